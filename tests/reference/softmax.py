"""Softmax attention as its paper writes it, one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from imagegen.attention.softmax import SoftmaxAttention
from tests.reference import over_heads


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Vaswani et al. (2017), eq. 1, over the positions up to each one. Three times "n d"."""
    return torch.stack([softmax_over(q[i], k[: i + 1], v[: i + 1]) for i in range(len(q))])


def softmax_over(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one query "d" over the keys and values "n d" given."""
    weights = (k @ q / len(q) ** 0.5).exp()
    return weights @ v / weights.sum()


def reference(module: SoftmaxAttention, x: Tensor) -> Tensor:
    """The output of `module`, literally."""
    return over_heads(module, x, softmax_attention)
