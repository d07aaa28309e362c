"""Attention by hashing as its paper writes it, one position at a time.

The one difference is the one that the module describes: each bucket is cut into chunks by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from imagegen.attention.lsh import LSHAttention
from tests.reference.softmax import softmax_over


def bucket(x: Tensor, rotation: Tensor) -> int:
    """Kitaev et al. (2020), section 2: h(x) = argmax([xR; -xR])."""
    rotated = x @ rotation
    return int(torch.cat([rotated, -rotated]).argmax())


def seen_in_round(buckets: list[int], i: int, chunk: int) -> set[int]:
    """P_i of one round: earlier positions of i's bucket in i's chunk and in the one before."""
    members = [j for j in range(i + 1) if buckets[j] == buckets[i]]
    mine = members.index(i) // chunk
    return {j for place, j in enumerate(members) if place // chunk >= mine - 1} - {i}


def lsh_attention(q: Tensor, v: Tensor, rotations: Tensor, chunk: int) -> Tensor:
    """Eq. 2 with keys q / |q| over the union of the rounds, eq. 6. "n d", "n m", "d r p"."""
    rounds = [[bucket(x, rotation) for x in q] for rotation in rotations.unbind(1)]
    k = q / q.norm(dim=-1, keepdim=True)
    rows = []
    for i in range(len(q)):
        seen = set().union(*(seen_in_round(buckets, i, chunk) for buckets in rounds)) or {i}
        rows.append(softmax_over(q[i], k[list(seen)], v[list(seen)]))
    return torch.stack(rows)


def reference(module: LSHAttention, x: Tensor) -> Tensor:
    """The output of `module`, literally."""
    images = []
    for sequence in x:
        q = sequence @ module.qk.weight.T + module.qk.bias
        v = sequence @ module.v.weight.T + module.v.bias
        heads = [
            lsh_attention(a, b, module.rotations, module.chunk_size)
            for a, b in zip(q.chunk(module.n_heads, -1), v.chunk(module.n_heads, -1), strict=True)
        ]
        images.append(torch.cat(heads, dim=-1) @ module.out.weight.T + module.out.bias)
    return torch.stack(images)
