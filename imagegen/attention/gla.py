"""Gated linear attention (Yang et al., 2023): each key feature forgets at its own, learned rate.

The paper's equations, for one head:

    S_t = (alpha_t^T 1) * S_(t-1) + k_t^T v_t,  o_t = q_t S_t                      (3)
    O = (P * M) V,  P_ij = sum_k Q_ik K_jk exp(log B_ik - log B_jk) where i >= j   (4)
        with b_t = alpha_1 ... alpha_t
    alpha_t = sigmoid(x_t W_alpha^1 W_alpha^2 + b_alpha)^(1 / tau)                 (section 4.4)
    r_t = swish(x_t W_r + b_r),  y_t = (r_t * Concat(LN(o^1_t), ..., LN(o^H_t))) W_O

The difference of logarithms in P, unsafe where a decay is strong, is what the secondary chunking of
section 4.3 is for; `decay.decayed_scores` carries it down to blocks of one position.

Axes: `b` batch, `n` position, `h` head, `d` query/key feature, `m` value feature, `e` model width.
"""

from __future__ import annotations

from typing import Any

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.attention.decay_attention import DecayAttention, DecayState, Inputs
from imagegen.attention.short_convolution import ShortConvolution
from imagegen.core.errors import UserError


class GatedLinearAttention(DecayAttention):
    """Multi-head gated linear attention.

    Args:
        expand_k, expand_v: key and value features of a head, as multiples of head_dim.
        gate_rank: width between W_alpha^1 and W_alpha^2.
        gate_temperature: tau; the larger, the longer the memory.
        output_norm: whether each head's output is normalised (the paper's LayerNorm).
        output_gate: whether the output is gated by r_t.
        conv_size: positions that a short convolution over queries, keys and values sees; 0, as in
            the paper, for none.
        context: see `DecayAttention`.

    Raises:
        UserError: for a rank below one, a temperature that is not above zero, or features that are
            not whole numbers.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_rank: int = 16,
        gate_temperature: float = 16.0,
        output_norm: bool = True,
        output_gate: bool = True,
        conv_size: int = 0,
        **context: Any,
    ) -> None:
        super().__init__(d_model, n_heads, head_dim, **context)
        if gate_rank < 1:
            raise UserError(f"attention.gate_rank={gate_rank} must be at least 1.")
        if not gate_temperature > 0:
            raise UserError(f"attention.gate_temperature={gate_temperature} must be above 0.")
        self.key_dim = self._features("expand_k", expand_k)
        self.value_dim = self._features("expand_v", expand_v)
        self.gate_temperature = gate_temperature
        keys, values = self.n_heads * self.key_dim, self.n_heads * self.value_dim
        self.qkv = nn.Linear(d_model, 2 * keys + values, bias=False)
        self.short_convolution = ShortConvolution(2 * keys + values, conv_size)
        self.decay = nn.Sequential(
            nn.Linear(d_model, gate_rank, bias=False), nn.Linear(gate_rank, keys)
        )
        self.norm = nn.LayerNorm(self.value_dim, eps=self.norm_eps) if output_norm else None
        self.gate = nn.Linear(d_model, values) if output_gate else None
        self.out = nn.Linear(values, d_model, bias=False)

    def _inputs(self, x: Float[Tensor, "b n e"], state: DecayState) -> Inputs:
        dtype = self._state_dtype()
        projected, conv = self.short_convolution(self.qkv(x).to(dtype), state.conv)
        log_decay = F.logsigmoid(self.decay(x).to(dtype)) / self.gate_temperature
        sizes = [self.n_heads * f for f in (self.key_dim, self.key_dim, self.value_dim)]
        q, k, v, log_decay = (
            rearrange(t, "b n (h f) -> b h n f", h=self.n_heads)
            for t in (*projected.split(sizes, dim=-1), log_decay)
        )
        return Inputs(q / self.key_dim**0.5, k, v, log_decay, conv)

    def _output(
        self, y: Float[Tensor, "b h n m"], x: Float[Tensor, "b n e"]
    ) -> Float[Tensor, "b n e"]:
        y = y.to(x.dtype)
        if self.norm is not None:
            y = self.norm(y)
        y = rearrange(y, "b h n m -> b n (h m)")
        if self.gate is not None:
            y = F.silu(self.gate(x)) * y
        return self.out(y)
