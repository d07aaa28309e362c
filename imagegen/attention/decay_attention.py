"""What retention, SSD and gated linear attention have in common.

Axes: `b` batch, `n` position, `h` head, `d` query/key feature, `m` value feature, `e` model width,
`f` feature of the decay (`d`, or 1 for a decay per head), `w` inputs of the convolution.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from imagegen.attention.base import DEFAULT_CHUNK, AttentionState, CausalAttention, Position
from imagegen.attention.decay import (
    chunked_decay_attention,
    recurrent_decay_attention,
)
from imagegen.attention.short_convolution import ShortConvolution
from imagegen.core.errors import UserError


@dataclass
class DecayState(AttentionState):
    """S, the last inputs of the short convolution, and the number of positions so far."""

    s: Float[Tensor, "b h d m"]
    conv: Float[Tensor, "b w channels"]
    position: Position = 0


class Inputs(NamedTuple):
    """Queries, keys, values and log decays (see `chunked_decay_attention`), float32 at least.

    `conv` are the inputs that the short convolution of the next position needs; `skip`, of the
    shape of the values, reaches the output past the state.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    conv: Tensor
    skip: Tensor | None = None


class DecayAttention(CausalAttention[DecayState]):
    """Linear attention with a decaying state.

    Subclasses set `key_dim` and `value_dim`, the features of a head, `short_convolution` and `out`,
    and say how inputs become queries, keys, values and decays, and how the result leaves.

    Args:
        chunk_size: longest chunk of the parallel form, a power of two.
        norm_eps: added to the variance, or the mean square, in the norm of the output.
        context: see `CausalAttention`.

    Raises:
        UserError: for a chunk size that is not a power of two, or a norm_eps not above 0.
    """

    key_dim: int
    value_dim: int
    short_convolution: ShortConvolution
    out: nn.Linear

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        chunk_size: int = DEFAULT_CHUNK,
        norm_eps: float = 1e-5,
        **context: Any,
    ) -> None:
        super().__init__(d_model, n_heads, head_dim, **context)
        if chunk_size < 1 or chunk_size & (chunk_size - 1):
            raise UserError(f"attention.chunk_size={chunk_size} must be a power of two.")
        if not 0 < norm_eps < math.inf:
            raise UserError(f"attention.norm_eps={norm_eps} must be above 0.")
        self.chunk_size = chunk_size
        self.norm_eps = norm_eps

    @abstractmethod
    def _inputs(self, x: Float[Tensor, "b n e"], state: DecayState) -> Inputs:
        """What the decaying state is fed with."""

    @abstractmethod
    def _output(
        self, y: Float[Tensor, "b h n m"], x: Float[Tensor, "b n e"]
    ) -> Float[Tensor, "b n e"]:
        """Normalise, gate and project what was read from the state."""

    def forward(
        self, x: Float[Tensor, "b n e"], state: DecayState | None = None
    ) -> tuple[Float[Tensor, "b n e"], DecayState]:
        if state is None:
            state = self.initial_state(x.shape[0])
        q, k, v, log_decay, conv, skip = self._inputs(x, state)
        with torch.autocast(x.device.type, enabled=False):
            y, s = chunked_decay_attention(q, k, v, log_decay, state.s, self.chunk_size)
        y = self._output(y if skip is None else y + skip, x)
        return y, DecayState(s, conv, state.position + x.shape[1])

    def step(
        self, x: Float[Tensor, "b e"], state: DecayState
    ) -> tuple[Float[Tensor, "b e"], DecayState]:
        x = x.unsqueeze(1)
        q, k, v, log_decay, conv, skip = self._inputs(x, state)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v, log_decay = (t.squeeze(2) for t in (q, k, v, log_decay))
            y, s = recurrent_decay_attention(q, k, v, log_decay, state.s)
        y = y.unsqueeze(2)
        y = self._output(y if skip is None else y + skip, x).squeeze(1)
        return y, DecayState(s, conv, state.position + 1)

    def initial_state(self, batch_size: int) -> DecayState:
        dtype, device = self._state_dtype(), self.out.weight.device
        return DecayState(
            torch.zeros(
                batch_size, self.n_heads, self.key_dim, self.value_dim, dtype=dtype, device=device
            ),
            self.short_convolution.initial_state(batch_size, dtype, device),
        )

    def _state_dtype(self) -> torch.dtype:
        # Sums over thousands of positions need float32, whatever the layers around them use.
        return torch.promote_types(self.out.weight.dtype, torch.float32)

    def _features(self, name: str, factor: float) -> int:
        """head_dim times the option `name`."""
        result = factor * self.head_dim
        if not 1 <= result < math.inf or result != round(result):
            raise UserError(
                f"attention.{name}={factor} times head_dim={self.head_dim} makes {result:g} "
                "features per head, which must be a whole number of at least 1; "
                "change one of the two."
            )
        return round(result)
