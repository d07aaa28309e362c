"""Gated linear attention as its paper writes it, one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from imagegen.attention.gla import GatedLinearAttention
from tests.reference.short_convolution import short_convolution


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """Yang et al. (2023), section 4.1: S_t = (alpha_t^T 1) * S_(t-1) + k_t^T v_t, o_t = q_t S_t.

    Args:
        q, k, alpha: "n d", of one head.
        v: "n m".
    """
    state = v.new_zeros(q.shape[1], v.shape[1])
    rows = []
    for t in range(len(q)):
        state = torch.outer(alpha[t], torch.ones_like(v[t])) * state + torch.outer(k[t], v[t])
        rows.append(q[t] @ state)
    return torch.stack(rows)


def reference(module: GatedLinearAttention, x: Tensor) -> Tensor:
    """The output of `module`, literally (section 4.4)."""
    keys, values = module.key_dim, module.value_dim
    first, second = module.decay
    images = []
    for sequence in x:
        projected = short_convolution(module.short_convolution, sequence @ module.qkv.weight.T)
        q, k, v = projected.split([module.n_heads * f for f in (keys, keys, values)], dim=-1)
        logits = sequence @ first.weight.T @ second.weight.T + second.bias
        alpha = logits.sigmoid() ** (1 / module.gate_temperature)
        heads = []
        for h in range(module.n_heads):
            part = slice(h * keys, (h + 1) * keys)
            y = gated_linear_attention(
                q[:, part] / keys**0.5,
                k[:, part],
                v[:, h * values : (h + 1) * values],
                alpha[:, part],
            )
            if module.norm is not None:
                mean = y.mean(dim=-1, keepdim=True)
                variance = ((y - mean) ** 2).mean(dim=-1, keepdim=True)
                y = (y - mean) / (variance + module.norm.eps).sqrt()
                y = y * module.norm.weight + module.norm.bias
            heads.append(y)
        y = torch.cat(heads, dim=-1)
        if module.gate is not None:
            gate = sequence @ module.gate.weight.T + module.gate.bias
            y = gate * gate.sigmoid() * y
        images.append(y @ module.out.weight.T)
    return torch.stack(images)
