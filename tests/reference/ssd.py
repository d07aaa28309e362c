"""The state space model of Mamba-2 as its paper writes it, one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from imagegen.attention.ssd import StateSpaceDuality
from tests.reference.short_convolution import short_convolution


def state_space_model(x: Tensor, b: Tensor, c: Tensor, delta: Tensor, a: Tensor) -> Tensor:
    """Dao and Gu (2024), eq. 2: h_t = exp(Delta_t A) h_(t-1) + Delta_t B_t x_t, y_t = C_t^T h_t.

    Args:
        x: "n m", of one head.
        b, c: "n d".
        delta: "n".
        a: A, a negative number.
    """
    state = x.new_zeros(b.shape[1], x.shape[1])
    rows = []
    for t in range(len(x)):
        state = (delta[t] * a).exp() * state + delta[t] * torch.outer(b[t], x[t])
        rows.append(c[t] @ state)
    return torch.stack(rows)


def reference(module: StateSpaceDuality, x: Tensor) -> Tensor:
    """The output of `module`, literally."""
    width, d_state = module.value_dim, module.key_dim
    images = []
    for sequence in x:
        projected = short_convolution(module.short_convolution, sequence @ module.xbc.weight.T)
        values, b, c = projected.split([module.n_heads * width, d_state, d_state], dim=-1)
        delta = (1 + (sequence @ module.delta.weight.T + module.delta_bias).exp()).log()
        heads = []
        for h in range(module.n_heads):
            value = values[:, h * width : (h + 1) * width]
            y = state_space_model(value, b, c, delta[:, h], -module.log_a[h].exp())
            heads.append(y if module.skip is None else y + module.skip[h] * value)
        y = torch.cat(heads, dim=-1)
        if module.gate is not None:
            gate = sequence @ module.gate.weight.T
            y = y * gate * gate.sigmoid()
        if module.norm is not None:
            mean_square = (y**2).mean(dim=-1, keepdim=True)
            y = y / (mean_square + module.norm.eps).sqrt() * module.norm.weight
        images.append(y @ module.out.weight.T)
    return torch.stack(images)
