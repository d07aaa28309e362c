"""Local attention as its paper writes it, one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from imagegen.attention.local import LocalAttention
from tests.reference import over_heads


def local_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Beltagy et al. (2020), section 3.1: each position sees the last `window` ones only."""
    rows = []
    for i in range(len(q)):
        seen = slice(max(0, i - window + 1), i + 1)
        rows.append(softmax_over(q[i], k[seen], v[seen]))
    return torch.stack(rows)


def softmax_over(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one query "d" over the keys and values "n d" given."""
    weights = torch.stack([(q @ key / len(q) ** 0.5).exp() for key in k])
    return sum(weight * value for weight, value in zip(weights, v, strict=True)) / weights.sum()


def reference(module: LocalAttention, x: Tensor) -> Tensor:
    """The output of `module`, literally."""

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return local_attention(q, k, v, module.window)

    return over_heads(module, x, head)
