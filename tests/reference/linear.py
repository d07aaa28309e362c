"""Linear attention as its paper writes it, one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from imagegen.attention.linear import LinearAttention
from tests.reference import over_heads


def phi(name: str, x: Tensor) -> Tensor:
    """Feature maps, as written."""
    if name == "elu":
        return torch.where(x > 0, x + 1, x.exp())
    return torch.where(x > 0, x, 0 * x)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, eps: float) -> Tensor:
    """Katharopoulos et al. (2020), eq. 8, for mapped q and k: sums over all earlier positions."""
    rows = []
    for i in range(len(q)):
        weights = [q[i] @ k[j] for j in range(i + 1)]
        numerator = sum(weight * v[j] for j, weight in enumerate(weights))
        rows.append(numerator / (sum(weights) + eps))
    return torch.stack(rows)


def reference(module: LinearAttention, x: Tensor) -> Tensor:
    """The output of `module`, literally."""
    name = module.feature_map.__name__

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(phi(name, q), phi(name, k), v, module.eps)

    return over_heads(module, x, head)
