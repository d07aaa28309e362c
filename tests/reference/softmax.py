"""Softmax attention as its paper writes it, one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from imagegen.attention.softmax import SoftmaxAttention
from tests.reference import over_heads


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Vaswani et al. (2017), eq. 1, over the positions up to each one. Three times "n d"."""
    rows = []
    for i in range(len(q)):
        weights = torch.stack([(q[i] @ k[j] / len(q[i]) ** 0.5).exp() for j in range(i + 1)])
        rows.append(sum(weight * v[j] for j, weight in enumerate(weights)) / weights.sum())
    return torch.stack(rows)


def reference(module: SoftmaxAttention, x: Tensor) -> Tensor:
    """The output of `module`, literally."""
    return over_heads(module, x, softmax_attention)
