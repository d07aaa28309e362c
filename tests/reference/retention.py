"""Retention as its paper writes it, one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from imagegen.attention.retention import Retention
from tests.reference.short_convolution import short_convolution


def retention(q: Tensor, k: Tensor, v: Tensor, gamma: float, rotary: bool) -> Tensor:
    """Sun et al. (2023), eq. 4: o_n = sum_m gamma^(n-m) (Q_n e^(in theta)) (K_m e^(im theta))† v_m.

    Args:
        q, k: "n d", of one head, k already divided by sqrt(d).
        v: "n m".
    """
    n, d = q.shape
    if rotary:
        q, k = (torch.complex(t[:, 0::2], t[:, 1::2]) for t in (q, k))
        theta = torch.tensor([10000 ** (-2 * i / d) for i in range(d // 2)], dtype=torch.float64)
        turns = [torch.polar(torch.ones_like(theta), t * theta) for t in range(n)]
        q = torch.stack([q[t] * turns[t] for t in range(n)])
        k = torch.stack([k[t] * turns[t] for t in range(n)])
    rows = []
    for t in range(n):
        decay = torch.tensor([gamma ** (t - u) for u in range(t + 1)], dtype=torch.float64)
        scores = (q[t] * k[: t + 1].conj()).sum(dim=-1).real
        rows.append((decay * scores) @ v[: t + 1])
    return torch.stack(rows)


def reference(module: Retention, x: Tensor) -> Tensor:
    """The output of `module`, literally (eq. 8)."""
    keys, values = module.key_dim, module.value_dim
    images = []
    for sequence in x:
        projected = short_convolution(module.short_convolution, sequence @ module.qkv.weight.T)
        q, k, v = projected.split([module.n_heads * f for f in (keys, keys, values)], dim=-1)
        heads = []
        for h in range(module.n_heads):
            key_part = slice(h * keys, (h + 1) * keys)
            value_part = slice(h * values, (h + 1) * values)
            gamma = 1 - 2.0 ** (-5 - h)
            y = retention(
                q[:, key_part], k[:, key_part] / keys**0.5, v[:, value_part], gamma, module.rotary
            )
            if module.output_norm:
                mean = y.mean(dim=-1, keepdim=True)
                variance = ((y - mean) ** 2).mean(dim=-1, keepdim=True)
                y = (y - mean) / (variance + module.norm_eps).sqrt()
            heads.append(y)
        y = torch.cat(heads, dim=-1)
        if module.gate is not None:
            gate = sequence @ module.gate.weight.T
            y = gate * gate.sigmoid() * y
        images.append(y @ module.out.weight.T)
    return torch.stack(images)
