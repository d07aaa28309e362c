"""Strided sparse attention as its paper writes it, one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from imagegen.attention.strided import StridedAttention
from tests.reference import over_heads
from tests.reference.softmax import softmax_over


def patterns(i: int, l: int) -> tuple[set[int], set[int]]:  # noqa: E741
    """Child et al. (2019), section 4.3: A1 and A2 of position i with stride l."""
    t = max(0, i - l)
    return set(range(t, i + 1)), {j for j in range(i + 1) if (i - j) % l == 0}


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, seen: list[set[int]]) -> Tensor:
    """Eq. 2 to 4: position i attends to the positions seen[i]."""
    rows = []
    for i in range(len(q)):
        s = sorted(seen[i])
        rows.append(softmax_over(q[i], k[s], v[s]))
    return torch.stack(rows)


def reference(module: StridedAttention, x: Tensor) -> Tensor:
    """The output of `module`, literally."""
    both = [patterns(i, module.stride) for i in range(x.shape[1])]
    head_index = -1

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal head_index
        head_index = (head_index + 1) % module.n_heads
        if module.merged:
            return sparse_attention(q, k, v, [a1 | a2 for a1, a2 in both])
        which = 0 if head_index < module.window_heads else 1
        return sparse_attention(q, k, v, [pair[which] for pair in both])

    return over_heads(module, x, head)
