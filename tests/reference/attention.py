"""Attention mechanisms as their papers write them, one position at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from imagegen.attention.base import CausalAttention
from imagegen.attention.linear import LinearAttention
from imagegen.attention.softmax import SoftmaxAttention


def phi(name: str, x: Tensor) -> Tensor:
    """Feature maps, as written."""
    if name == "elu":
        return torch.where(x > 0, x + 1, x.exp())
    return torch.where(x > 0, x, 0 * x)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float) -> Tensor:
    """Katharopoulos et al. (2020), eq. 8: sums over all earlier positions. "n d", "n d", "n m"."""
    rows = []
    q, k = phi(feature_map, q), phi(feature_map, k)
    for i in range(len(q)):
        weights = [q[i] @ k[j] for j in range(i + 1)]
        numerator = sum(weight * v[j] for j, weight in enumerate(weights))
        rows.append(numerator / (sum(weights) + eps))
    return torch.stack(rows)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Vaswani et al. (2017), eq. 1, over the positions up to each one. "n d", "n d", "n d"."""
    rows = []
    for i in range(len(q)):
        weights = torch.stack([(q[i] @ k[j] / len(q[i]) ** 0.5).exp() for j in range(i + 1)])
        rows.append(sum(weight * v[j] for j, weight in enumerate(weights)) / weights.sum())
    return torch.stack(rows)


def reference(module: CausalAttention, x: Tensor) -> Tensor:
    """The output of `module` for "b n e", computed literally from its weights."""
    head: Callable[[Tensor, Tensor, Tensor], Tensor]
    if isinstance(module, LinearAttention):
        name = module.feature_map.__name__

        def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return linear_attention(q, k, v, name, module.eps)
    elif isinstance(module, SoftmaxAttention):
        head = softmax_attention
    else:
        raise NotImplementedError(
            f"write the equations of {type(module).__name__} into tests/reference/attention.py"
        )
    images = []
    for sequence in x:
        projected = sequence @ module.qkv.weight.T + module.qkv.bias
        q, k, v = projected.split(module.n_heads * module.head_dim, dim=-1)
        heads = []
        for h in range(module.n_heads):
            part = slice(h * module.head_dim, (h + 1) * module.head_dim)
            heads.append(head(q[:, part], k[:, part], v[:, part]))
        images.append(torch.cat(heads, dim=-1) @ module.out.weight.T + module.out.bias)
    return torch.stack(images)
