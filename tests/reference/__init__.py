"""Slow, literal versions of the equations, in float64: what the fast forms are measured against.

`tests/reference/<name>.py` has `reference(module, x)` for the mechanism in
`imagegen/attention/<name>.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from imagegen.attention.base import CausalAttention


def reference(module: CausalAttention, x: Tensor) -> Tensor:
    """The output of `module` for "b n e", computed literally from its weights."""
    name = type(module).__module__.rpartition(".")[2]
    result: Tensor = importlib.import_module(f"tests.reference.{name}").reference(module, x)
    return result


def over_heads(
    module: CausalAttention, x: Tensor, head: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Project to queries, keys and values, apply `head` to each head of each image, project back.

    For mechanisms with the layers `qkv` and `out`; `head` maps three "n d" to "n d".
    """
    images = []
    for sequence in x:
        projected = sequence @ module.qkv.weight.T + module.qkv.bias
        q, k, v = projected.split(module.n_heads * module.head_dim, dim=-1)
        norm = getattr(module, "qk_norm", None)
        heads = []
        for h in range(module.n_heads):
            part = slice(h * module.head_dim, (h + 1) * module.head_dim)
            query, key = q[:, part], k[:, part]
            if norm is not None:
                query, key = (
                    norm.query * query / (query.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
                    norm.key * key / (key.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
                )
            heads.append(head(query, key, v[:, part]))
        images.append(torch.cat(heads, dim=-1) @ module.out.weight.T + module.out.bias)
    return torch.stack(images)
