"""DeltaNet as its papers write it, one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from imagegen.attention.delta import L2_EPS, DeltaNet
from tests.reference.short_convolution import short_convolution


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), as written."""
    return x / (1 + (-x).exp())


def unit(x: Tensor) -> Tensor:
    """A vector over its length."""
    return x / (x @ x + L2_EPS).sqrt()


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor | None) -> Tensor:
    """Yang et al. (2024), S_t = S_{t-1} - beta_t (S_{t-1} k_t - v_t) k_t^T and o_t = S_t q_t.

    S is "m d" as in the paper.
    """
    s, rows = v.new_zeros(v.shape[1], k.shape[1]), []
    for t in range(len(q)):
        s = s - beta[t] * torch.outer(s @ k[t] - v[t], k[t])
        rows.append(s @ q[t])
    return torch.stack(rows)


def layer(module: DeltaNet, x: Tensor, alpha: Tensor | None, rule: object) -> Tensor:
    """Everything around the rule, for one sequence "n e"; `alpha` is "n h a"."""
    keys, heads = module.n_heads * module.head_dim, []
    qkv = short_convolution(module.conv, x @ module.qkv.weight.T)
    qkv = qkv if module.conv.size else silu(qkv)
    q, k, v = qkv[:, :keys], qkv[:, keys : 2 * keys], qkv[:, 2 * keys :]
    beta = 1 / (1 + (-(x @ module.beta.weight.T)).exp())
    for h in range(module.n_heads):
        part = slice(h * module.head_dim, (h + 1) * module.head_dim)
        values = v[:, h * module.value_dim : (h + 1) * module.value_dim]
        queries = torch.stack([unit(row) for row in q[:, part]])
        units = torch.stack([unit(row) for row in k[:, part]])
        decay = None if alpha is None else alpha[:, h]
        o = rule(queries, units, values, beta[:, h], decay)  # type: ignore[operator]
        if module.norm is not None:
            mean_square = (o * o).mean(dim=-1, keepdim=True)
            o = o / (mean_square + module.norm.eps).sqrt() * module.norm.weight
        heads.append(o)
    return torch.cat(heads, dim=-1)


def reference(module: DeltaNet, x: Tensor) -> Tensor:
    """The output of `module`, literally."""
    images = []
    for sequence in x:
        o = layer(module, sequence, None, delta_rule)
        if module.output_gate is not None:
            o = o * silu(sequence @ module.output_gate.weight.T)
        images.append(o @ module.out.weight.T)
    return torch.stack(images)
