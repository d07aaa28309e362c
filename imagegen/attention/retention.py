"""Retention (Sun et al., 2023, "Retentive Network"): a fixed decay per head, rotated queries, keys.

The paper's equations, for one head with its decay gamma:

    Q = (X W_Q) Theta,  K = (X W_K) conj(Theta),  V = X W_V,  Theta_n = exp(i n theta)       (5)
    Retention(X) = (Q K^T * D) V,  D_nm = gamma^(n-m) where n >= m, else 0                   (5)
    S_n = gamma S_(n-1) + K_n^T V_n,  Retention(X_n) = Q_n S_n                               (6)
    gamma = 1 - 2^(-5 - arange(0, h)),  head_i = Retention(X, gamma_i)                       (8)
    Y = GroupNorm_h(Concat(head_1, ..., head_h)),  MSR(X) = (swish(X W_G) * Y) W_O           (8)

Eq. 7, the chunks, is what `decay.chunked_decay_attention` does.

Axes: `b` batch, `n` position, `h` head, `d` query/key feature, `m` value feature, `e` model width.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.attention.base import Position
from imagegen.attention.decay_attention import DecayAttention, DecayState, Inputs
from imagegen.attention.short_convolution import ShortConvolution
from imagegen.core.errors import UserError
from imagegen.core.float64 import float64_device


def rotated(x: Float[Tensor, "b h n d"], start: Position) -> Float[Tensor, "b h n d"]:
    """x_n exp(i n theta), each two neighbouring features being a complex number.

    Args:
        x: queries or keys, with an even number of features.
        start: the position of the first one.
    """
    n, d = x.shape[-2:]
    # float32 would be off by thousandths of a turn after some ten thousand positions.
    exact: dict[str, Any] = {"dtype": torch.float64, "device": float64_device(x.device)}
    theta = 10_000 ** (-torch.arange(0, d, 2, **exact) / d)
    angle = (start + torch.arange(n, **exact)).unsqueeze(-1) * theta
    cos, sin = (t.to(x.dtype).to(x.device) for t in (angle.cos(), angle.sin()))
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1).flatten(-2)


class Retention(DecayAttention):
    """Gated multi-scale retention (eq. 8).

    Of the three normalisations of the scores ("Retention Score Normalization", section 2.2) only
    1 / sqrt(d) is done. The others divide row n of D by sqrt(sum_m D_nm) and row n of the scores by
    max(|sum_m R_nm|, 1). With `output_norm` a factor of a row cancels in the group norm, but for
    its eps. Without it they would not cancel: the outputs are then those of eq. 5 over sqrt(d), and
    their scale grows with the span of a head.

    Args:
        expand_v: value features of a head, as a multiple of head_dim; 2 in the paper.
        rotary: whether queries and keys are rotated by their position (xPos, as in the paper).
        output_norm: whether each head's output is normalised (the paper's group norm).
        output_gate: whether the output is gated by swish(X W_G).
        conv_size: positions that a short convolution over queries, keys and values sees; 0, as in
            the paper, for none.
        context: see `DecayAttention`.

    Raises:
        UserError: for an odd head_dim with `rotary`, or features that are not whole numbers.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        expand_v: float = 2.0,
        rotary: bool = True,
        output_norm: bool = True,
        output_gate: bool = True,
        conv_size: int = 0,
        **context: Any,
    ) -> None:
        super().__init__(d_model, n_heads, head_dim, **context)
        self.key_dim = self.head_dim
        self.value_dim = self._features("expand_v", expand_v)
        if rotary and self.key_dim % 2:
            raise UserError(
                f"head_dim={self.key_dim} must be even for attention.rotary=true, which rotates "
                "pairs of features; choose another or set attention.rotary=false."
            )
        self.rotary = rotary
        self.output_norm = output_norm
        keys, values = self.n_heads * self.key_dim, self.n_heads * self.value_dim
        self.qkv = nn.Linear(d_model, 2 * keys + values, bias=False)
        self.short_convolution = ShortConvolution(2 * keys + values, conv_size)
        self.gate = nn.Linear(d_model, values, bias=False) if output_gate else None
        self.out = nn.Linear(values, d_model, bias=False)

    def _inputs(self, x: Float[Tensor, "b n e"], state: DecayState) -> Inputs:
        projected, conv = self.short_convolution(self.qkv(x).to(self._state_dtype()), state.conv)
        sizes = [2 * self.n_heads * self.key_dim, self.n_heads * self.value_dim]
        qk, v = projected.split(sizes, dim=-1)
        qk = rearrange(qk, "b n (two h d) -> b (two h) n d", two=2, h=self.n_heads)
        v = rearrange(v, "b n (h m) -> b h n m", h=self.n_heads)
        q, k = (rotated(qk, state.position) if self.rotary else qk).chunk(2, dim=1)
        head = torch.arange(self.n_heads, dtype=v.dtype, device=v.device)
        log_gamma = torch.log1p(-torch.exp2(-5 - head))
        log_decay = log_gamma.view(1, -1, 1, 1).expand(1, -1, x.shape[1], 1)
        # No other normalisation of the scores: it would cancel in the norm, where there is one.
        return Inputs(q, k / self.key_dim**0.5, v, log_decay, conv)

    def _output(
        self, y: Float[Tensor, "b h n m"], x: Float[Tensor, "b n e"]
    ) -> Float[Tensor, "b n e"]:
        if self.output_norm:
            # A group of channels is a head, so this is the group norm, without its affine part.
            y = F.layer_norm(y, (self.value_dim,), eps=self.norm_eps)
        y = rearrange(y, "b h n m -> b n (h m)").to(x.dtype)
        if self.gate is not None:
            y = F.silu(self.gate(x)) * y
        return self.out(y)
