"""State space duality (Dao and Gu, 2024, "Transformers are SSMs"): Mamba-2's layer.

The paper's equations, for one head with the scalar A_t = a_t:

    h_t = A_t h_(t-1) + B_t x_t,  y_t = C_t^T h_t                                  (2)
    Y = M X,  M = L * C B^T,  L_ij = a_i ... a_(j+1) where i >= j, else 0          (section 5)

with a_t = exp(Delta_t A) and B_t x_t scaled by Delta_t = softplus(.), A < 0 a number per head, as
the paper discretises them, and D x_t added to y_t. C, B and x are the queries, keys and values of
linear attention; all heads share C and B ("multi-value attention"). The chunks of section 6 are
what `decay.chunked_decay_attention` does.

Axes: `b` batch, `n` position, `h` head, `d` feature of B and C (the paper's N), `m` feature of x
(the paper's P), `e` model width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.attention.decay_attention import DecayAttention, DecayState, Inputs
from imagegen.attention.short_convolution import ShortConvolution
from imagegen.core.errors import UserError


class StateSpaceDuality(DecayAttention):
    """Mamba-2's mixing layer: convolution, state space model, gate and norm.

    Args:
        expand: features of x of all heads, as a multiple of n_heads * head_dim.
        d_state: features of B and C, and so the height of the state of a head. The paper takes
            64 or 128 (section 7.2), its code 128; here, where models are small, 64 halves the state
            and the work on it.
        conv_size: positions that the short convolution over x, B and C sees; 0 for none.
        skip: whether D x_t is added to the output.
        output_gate: whether the output is gated by silu(z_t), before the norm.
        output_norm: whether the output is normalised (RMS, over all heads).
        dt_min, dt_max: range in which Delta starts, evenly in its logarithm.
        a_min, a_max: range in which -A starts, evenly.
        context: see `DecayAttention`.

    Raises:
        UserError: for sizes below one, or ranges whose end is not above their start.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        expand: float = 2.0,
        d_state: int = 64,
        conv_size: int = 4,
        skip: bool = True,
        output_gate: bool = True,
        output_norm: bool = True,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        a_min: float = 1.0,
        a_max: float = 16.0,
        **context: Any,
    ) -> None:
        super().__init__(d_model, n_heads, head_dim, **context)
        if d_state < 1:
            raise UserError(f"attention.d_state={d_state} must be at least 1.")
        for name, low, high in (("dt", dt_min, dt_max), ("a", a_min, a_max)):
            if not 0 < low <= high < math.inf:
                raise UserError(
                    f"attention.{name}_min={low} must be above 0 and at most "
                    f"attention.{name}_max={high}."
                )
        self.key_dim = d_state
        self.value_dim = self._features("expand", expand)
        values = self.n_heads * self.value_dim
        self.xbc = nn.Linear(d_model, values + 2 * d_state, bias=False)
        self.delta = nn.Linear(d_model, self.n_heads, bias=False)
        self.short_convolution = ShortConvolution(values + 2 * d_state, conv_size, bias=True)
        start = math.log(dt_min) + torch.rand(self.n_heads) * math.log(dt_max / dt_min)
        # The inverse of softplus, in which Delta is learned.
        self.delta_bias = nn.Parameter(start.exp().expm1().log())
        self.log_a = nn.Parameter(torch.empty(self.n_heads).uniform_(a_min, a_max).log())
        self.skip = nn.Parameter(torch.ones(self.n_heads)) if skip else None
        self.gate = nn.Linear(d_model, values, bias=False) if output_gate else None
        self.norm = nn.RMSNorm(values, eps=self.norm_eps) if output_norm else None
        self.out = nn.Linear(values, d_model, bias=False)

    def _inputs(self, x: Float[Tensor, "b n e"], state: DecayState) -> Inputs:
        dtype = self._state_dtype()
        projected, conv = self.short_convolution(self.xbc(x).to(dtype), state.conv)
        sizes = [self.n_heads * self.value_dim, self.key_dim, self.key_dim]
        values, b, c = projected.split(sizes, dim=-1)
        values = rearrange(values, "b n (h m) -> b h n m", h=self.n_heads)
        delta = F.softplus(self.delta(x).to(dtype) + self.delta_bias)
        delta = rearrange(delta, "b n h -> b h n 1")
        a = rearrange(-self.log_a.exp(), "h -> h 1 1")
        skip = None
        if self.skip is not None:
            skip = rearrange(self.skip, "h -> h 1 1") * values
        return Inputs(c.unsqueeze(1), b.unsqueeze(1), delta * values, delta * a, conv, skip)

    def _output(
        self, y: Float[Tensor, "b h n m"], x: Float[Tensor, "b n e"]
    ) -> Float[Tensor, "b n e"]:
        y = rearrange(y, "b h n m -> b n (h m)").to(x.dtype)
        if self.gate is not None:
            y = y * F.silu(self.gate(x))
        if self.norm is not None:
            y = self.norm(y)
        return self.out(y)
