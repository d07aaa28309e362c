"""DeltaNet (Schlag et al., 2021; Yang et al., 2024): linear attention that corrects what it stored.

Axes: `b` batch, `n` position, `h` head, `d` query/key feature, `m` value feature, `e` model width,
`f` features of all heads' queries, keys and values, `r` inputs of the short convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.attention.base import DEFAULT_CHUNK, AttentionState, CausalAttention
from imagegen.attention.delta_rule import chunked_delta_rule, recurrent_delta_rule
from imagegen.attention.short_convolution import ShortConvolution
from imagegen.core.errors import UserError

L2_EPS = 1e-6


@dataclass
class DeltaState(AttentionState):
    """The fast weight S and the last inputs of the short convolution, float32 at least."""

    s: Float[Tensor, "b h d m"]
    recent: Float[Tensor, "b r f"]


class DeltaNet(CausalAttention[DeltaState]):
    """Multi-head attention by the delta rule, with the layer of Yang et al. (2024), section 3.3.

        q_t, k_t = L2(SiLU(conv(W x_t))),   v_t = SiLU(conv(W x_t)),   beta_t = sigmoid(W x_t)
        S_t = S_{t-1} - beta_t (S_{t-1} k_t - v_t) k_t^T,   o_t = S_t q_t
        y_t = W_o RMSNorm(o_t)

    What S returns for a key is read first, and only the difference from the value is written: a key
    that comes again overwrites instead of adding to a growing sum.

    Args:
        expand_v: value features of a head, as a multiple of head_dim.
        conv_size: positions that the short convolution of queries, keys and values sees; 0: none.
        output_norm: whether an RMSNorm over each head's features follows.
        output_gate: whether the outputs are multiplied by SiLU(W x_t) after the norm.
        norm_eps: added to the mean square in the RMSNorm.
        chunk_size: longest chunk of the parallel form.
        context: see `CausalAttention`.

    Raises:
        UserError: for a chunk size that is not a power of two, a negative conv_size, value features
            that are not whole, or a norm_eps not above 0.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        expand_v: float = 1.0,
        conv_size: int = 4,
        output_norm: bool = True,
        output_gate: bool = False,
        norm_eps: float = 1e-5,
        chunk_size: int = DEFAULT_CHUNK,
        **context: Any,
    ) -> None:
        super().__init__(d_model, n_heads, head_dim, **context)
        if chunk_size < 1 or chunk_size & (chunk_size - 1):
            raise UserError(f"attention.chunk_size={chunk_size} must be a power of two.")
        value_dim = expand_v * self.head_dim
        if not 1 <= value_dim < math.inf or value_dim != round(value_dim):
            raise UserError(
                f"attention.expand_v={expand_v} times head_dim={self.head_dim} must be a whole "
                f"number of at least 1, but is {value_dim:g}; change one of the two."
            )
        if not 0 < norm_eps < math.inf:
            raise UserError(f"attention.norm_eps={norm_eps} must be above 0.")
        self.chunk_size = chunk_size
        self.value_dim = round(value_dim)
        keys, values = self.n_heads * self.head_dim, self.n_heads * self.value_dim
        self.qkv = nn.Linear(d_model, 2 * keys + values, bias=False)
        self.conv = ShortConvolution(2 * keys + values, conv_size)
        self.beta = nn.Linear(d_model, self.n_heads, bias=False)
        self.norm = nn.RMSNorm(self.value_dim, eps=norm_eps) if output_norm else None
        self.output_gate: nn.Module | None = (
            nn.Linear(d_model, values, bias=False) if output_gate else None
        )
        self.gate_activation: Callable[[Tensor], Tensor] = F.silu
        self.out = nn.Linear(values, d_model, bias=False)

    def forward(
        self, x: Float[Tensor, "b n e"], state: DeltaState | None = None
    ) -> tuple[Float[Tensor, "b n e"], DeltaState]:
        state = self.initial_state(x.shape[0]) if state is None else state
        qkv, beta, log_decay, gate = self._projected(x)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v, recent = self._features(qkv, state.recent)
            q, k, v, beta = (t.transpose(1, 2) for t in (q, k, v, beta))
            log_decay = None if log_decay is None else log_decay.transpose(1, 2)
            o, s = chunked_delta_rule(q, k, v, beta, log_decay, state.s, self.chunk_size)
            y = self._normed(o.transpose(1, 2), gate)
        return self.out(y.to(x.dtype)), DeltaState(s, recent)

    def step(
        self, x: Float[Tensor, "b e"], state: DeltaState
    ) -> tuple[Float[Tensor, "b e"], DeltaState]:
        qkv, beta, log_decay, gate = self._projected(x)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v, recent = self._features(qkv.unsqueeze(1), state.recent)
            o, s = recurrent_delta_rule(
                q.squeeze(1), k.squeeze(1), v.squeeze(1), beta, log_decay, state.s
            )
            y = self._normed(o, gate)
        return self.out(y.to(x.dtype)), DeltaState(s, recent)

    def initial_state(self, batch_size: int) -> DeltaState:
        weight = self.qkv.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        shape = (batch_size, self.n_heads, self.head_dim, self.value_dim)
        return DeltaState(
            torch.zeros(shape, dtype=dtype, device=weight.device),
            self.conv.initial_state(batch_size, dtype, weight.device),
        )

    def _log_decay(self, x: Float[Tensor, "*b e"]) -> Float[Tensor, "*b h a"] | None:
        """Logarithms of the decays, float32 at least; None where nothing decays."""
        return None

    def _projected(
        self, x: Float[Tensor, "*b e"]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        gate = None if self.output_gate is None else self.output_gate(x)
        beta = self._precise(self.beta(x)).sigmoid()
        return self._precise(self.qkv(x)), beta, self._log_decay(x), gate

    def _features(
        self, qkv: Float[Tensor, "b n f"], recent: Float[Tensor, "b r f"]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv, recent = self.conv(qkv, recent)
        # The convolution ends in a SiLU of its own.
        qkv = qkv if self.conv.size else F.silu(qkv)
        sizes = [self.n_heads * f for f in (self.head_dim, self.head_dim, self.value_dim)]
        q, k, v = (
            rearrange(t, "b n (h f) -> b n h f", h=self.n_heads) for t in qkv.split(sizes, dim=-1)
        )
        return _unit(q), _unit(k), v, recent

    def _normed(
        self, o: Float[Tensor, "*b h m"], gate: Float[Tensor, "*b hm"] | None
    ) -> Float[Tensor, "*b hm"]:
        if self.norm is not None:
            o = F.rms_norm(o, o.shape[-1:], self.norm.weight.to(o.dtype), self.norm.eps)
        y = o.flatten(-2)
        return y if gate is None else y * self.gate_activation(gate.to(y.dtype))

    @staticmethod
    def _precise(x: Tensor) -> Tensor:
        # States gather thousands of positions: float32, whatever the layers around them use.
        return x.to(torch.promote_types(x.dtype, torch.float32))


def _unit(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """x / |x|, with a gradient that stays finite at 0."""
    return x * (x.square().sum(dim=-1, keepdim=True) + L2_EPS).rsqrt()
