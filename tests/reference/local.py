"""Local attention as its paper writes it, one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from imagegen.attention.local import LocalAttention
from tests.reference import over_heads
from tests.reference.softmax import softmax_over


def local_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Beltagy et al. (2020), section 3.1: each position sees the last `window` ones only."""
    rows = []
    for i in range(len(q)):
        seen = slice(max(0, i - window + 1), i + 1)
        rows.append(softmax_over(q[i], k[seen], v[seen]))
    return torch.stack(rows)


def reference(module: LocalAttention, x: Tensor) -> Tensor:
    """The output of `module`, literally."""

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return local_attention(q, k, v, module.window)

    return over_heads(module, x, head)
