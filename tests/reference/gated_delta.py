"""Gated DeltaNet and Kimi Delta Attention as their papers write them, one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from imagegen.attention.gated_delta import GatedDeltaNet
from tests.reference.delta import layer, silu


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
    """Yang, Kautz and Hatamizadeh (2025), eq. 10, with their S, "m d".

    S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T and o_t = S_t q_t.
    """
    identity = torch.eye(k.shape[1], dtype=k.dtype)
    s, rows = v.new_zeros(v.shape[1], k.shape[1]), []
    for t in range(len(q)):
        s = s @ (alpha[t] * (identity - beta[t] * torch.outer(k[t], k[t])))
        s = s + beta[t] * torch.outer(v[t], k[t])
        rows.append(s @ q[t])
    return torch.stack(rows)


def kimi_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
    """Kimi Linear (2025), eq. 1, with its S, "d m".

    S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T and o_t = S_t^T q_t.
    """
    identity = torch.eye(k.shape[1], dtype=k.dtype)
    s, rows = v.new_zeros(k.shape[1], v.shape[1]), []
    for t in range(len(q)):
        s = (identity - beta[t] * torch.outer(k[t], k[t])) @ torch.diag(alpha[t]) @ s
        s = s + beta[t] * torch.outer(k[t], v[t])
        rows.append(s.T @ q[t])
    return torch.stack(rows)


def projected(layers: nn.Module, x: Tensor) -> Tensor:
    """One matrix, or two after each other."""
    for linear in layers if isinstance(layers, nn.Sequential) else [layers]:
        x = x @ linear.weight.T
    return x


def reference(module: GatedDeltaNet, x: Tensor) -> Tensor:
    """The output of `module`, literally."""
    channelwise = isinstance(module.decay, nn.Sequential)
    images = []
    for sequence in x:
        raw = projected(module.decay, sequence) + module.step_bias
        softplus = (1 + raw.exp()).log().reshape(len(sequence), module.n_heads, -1)
        alpha = (-module.log_rate.exp()[:, None] * softplus).exp()
        o = layer(module, sequence, alpha, kimi_delta_rule if channelwise else gated_delta_rule)
        if module.output_gate is not None:
            gate = projected(module.output_gate, sequence)
            o = o * (1 / (1 + (-gate).exp()) if channelwise else silu(gate))
        images.append(o @ module.out.weight.T)
    return torch.stack(images)
