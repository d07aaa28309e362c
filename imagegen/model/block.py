"""The block that the model repeats: causal attention and a feed-forward layer.

Axes: `b` batch, `n` position, `e` model width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from imagegen.attention.base import AttentionState, CausalAttention
from imagegen.core.errors import UserError
from imagegen.model.row_convolution import RowConvolution, RowState

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}

_LEVELS = 1 << 16


def known(name: str, value: str, choices: dict[str, type[nn.Module]]) -> type[nn.Module]:
    """The choice called `value`.

    Raises:
        UserError: if there is none.
    """
    if value not in choices:
        raise UserError(f"model.{name}={value} is unknown; choose one of {', '.join(choices)}.")
    return choices[value]


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`; on the CPU, 16 random bits decide of each number.

    PyTorch draws 64 bits for each, one after the other on one core, which took a fifth of a
    training step. The probability is rounded to a multiple of 2^-16, and what is left is scaled
    accordingly. The bits depend on torch's seed.
    """

    def forward(self, input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Zero numbers at random and scale the others, while training."""
        threshold = round(self.p * _LEVELS)
        inactive = not self.training or not 0 < threshold < _LEVELS
        if inactive or input.device.type != "cpu" or self.inplace:
            return super().forward(input)
        seed = int(torch.randint(1 << 62, ()))
        words = math.ceil(input.numel() / 4)
        bits = np.random.Generator(np.random.SFC64(seed)).integers(
            0, 1 << 64, size=words, dtype=np.uint64
        )
        drawn = torch.from_numpy(bits.view(np.int16))[: input.numel()].view(input.shape)
        # As signed numbers, 2^15 lower.
        kept = (drawn >= threshold - _LEVELS // 2).to(input.dtype)
        return input * kept.mul_(_LEVELS / (_LEVELS - threshold))


class GatedLinearUnit(nn.Module):
    """activation(x W) * (x V), the two halves of one projection (Shazeer, 2020, eq. 5).

    Args:
        activation: of the first half.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Float[Tensor, "... two_f"]) -> Float[Tensor, "... f"]:
        gate, value = x.chunk(2, dim=-1)
        return self.activation(gate) * value


@dataclasses.dataclass
class BlockState(AttentionState):
    """The states of a block's convolution and of its attention."""

    rows: RowState
    attention: AttentionState

    def tensors(self) -> list[Tensor]:
        return [*self.rows.tensors(), *self.attention.tensors()]

    def clone(self) -> BlockState:
        return BlockState(self.rows.clone(), self.attention.clone())

    def repeat(self, times: int) -> BlockState:
        return BlockState(self.rows.repeat(times), self.attention.repeat(times))


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """What all blocks of a model have in common.

    Attributes:
        d_model: width `e`.
        n_heads: attention heads.
        d_ff: hidden features of the feed-forward layer.
        head_dim: features of a head; d_model / n_heads by default.
        dropout: share of activations zeroed in training, 0 to below 1.
        activation: a name of `ACTIVATIONS`.
        norm_first: whether a norm precedes each layer inside the residual branch, or follows the
            sum as in the paper's model.
        norm: a name of `NORMS`.
        gated: whether the feed-forward layer is a gated linear unit; d_ff is then the size of each
            half.
        residual_scale: initial value of a learned factor for each feature on what a layer adds
            (LayerScale, Touvron et al., 2021, eq. 4); no such factor by default.
        convolution: [rows, columns] of a `RowConvolution` that comes first, with a norm and a
            residual connection of its own; none by default.

    Raises:
        UserError: for sizes and shares out of their range.
    """

    d_model: int
    n_heads: int
    d_ff: int
    head_dim: int | None = None
    dropout: float = 0.0
    activation: str = "gelu"
    norm_first: bool = True
    norm: str = "layer"
    gated: bool = False
    residual_scale: float | None = None
    convolution: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ff"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name}={getattr(self, name)} must be at least 1.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout={self.dropout} must be at least 0 and below 1.")


class Block(nn.Module):
    """Attention and a feed-forward layer, each with its residual connection and norm.

    Args:
        attention: the mechanism.
        options: see `BlockOptions`.
        row_length: positions in a row of the image.

    Raises:
        UserError: for unknown names, a scale that is not finite and an impossible convolution.
    """

    def __init__(
        self, attention: CausalAttention[Any], options: BlockOptions, row_length: int
    ) -> None:
        super().__init__()
        d_model, norm = options.d_model, known("norm", options.norm, NORMS)
        self.attention = attention
        self.norm_first = options.norm_first
        self.norm1 = norm(d_model)
        self.norm2 = norm(d_model)
        nonlinear = known("activation", options.activation, ACTIVATIONS)()
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, 2 * options.d_ff if options.gated else options.d_ff),
            GatedLinearUnit(nonlinear) if options.gated else nonlinear,
            Dropout(options.dropout),
            nn.Linear(options.d_ff, d_model),
        )
        self.dropout = Dropout(options.dropout)
        self.scale1 = self.scale2 = None
        if (scale := options.residual_scale) is not None:
            if not math.isfinite(scale):
                raise UserError(f"model.residual_scale={scale} must be a finite number.")
            self.scale1, self.scale2 = (
                nn.Parameter(torch.full((d_model,), float(scale))) for _ in range(2)
            )

        self.convolution = None
        if (convolution := options.convolution) is not None:
            if len(convolution) != 2:
                raise UserError(
                    f"model.convolution={list(convolution)} must be [rows, columns], such as [2,2]."
                )
            self.convolution = RowConvolution(d_model, row_length, *convolution)
            self.norm0 = norm(d_model)

    def forward(
        self, x: Float[Tensor, "b n e"], state: AttentionState | None
    ) -> tuple[Float[Tensor, "b n e"], AttentionState]:
        """All positions at once, continuing from `state`."""
        if self.convolution is None:
            return self._attended(x, state)
        assert state is None or isinstance(state, BlockState)
        y, rows = self.convolution(self._before(x), None if state is None else state.rows)
        x, after = self._attended(self._after(x, y), None if state is None else state.attention)
        return x, BlockState(rows, after)

    def step(
        self, x: Float[Tensor, "b e"], state: AttentionState
    ) -> tuple[Float[Tensor, "b e"], AttentionState]:
        """One position."""
        if self.convolution is None:
            return self._attended_step(x, state)
        assert isinstance(state, BlockState)
        y, rows = self.convolution.step(self._before(x), state.rows)
        x, after = self._attended_step(self._after(x, y), state.attention)
        return x, BlockState(rows, after)

    def check_any_order(self) -> None:
        """Refuse what looks for neighbours at fixed distances in the sequence.

        Raises:
            UserError: for such an attention mechanism, and a convolution.
        """
        found = [f"attention {type(self.attention).__name__}"] * self.attention.needs_raster
        found += ["model.convolution"] * (self.convolution is not None)
        if found:
            raise UserError(
                f"{found[0]} looks for neighbouring pixels at fixed distances in the sequence, "
                "which model.order=any does not keep; leave it out, or take model.order=raster."
            )

    def initial_state(self, batch_size: int) -> AttentionState:
        """The state before the first position."""
        state = self.attention.initial_state(batch_size)
        if self.convolution is None:
            return state
        return BlockState(self.convolution.initial_state(batch_size), state)

    def _before(self, x: Tensor) -> Tensor:
        return self.norm0(x) if self.norm_first else x

    def _after(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.dropout(y)
        return x if self.norm_first else self.norm0(x)

    def _attended(self, x: Tensor, state: AttentionState | None) -> tuple[Tensor, AttentionState]:
        y, state = self.attention(self.norm1(x) if self.norm_first else x, state)
        return self._residuals(x, y), state

    def _attended_step(self, x: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        y, state = self.attention.step(self.norm1(x) if self.norm_first else x, state)
        return self._residuals(x, y), state

    def _residuals(self, x: Tensor, y: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self._added(y, self.scale1)
            return x + self._added(self.feed_forward(self.norm2(x)), self.scale2)
        x = self.norm1(x + self._added(y, self.scale1))
        return self.norm2(x + self._added(self.feed_forward(x), self.scale2))

    def _added(self, y: Tensor, scale: Tensor | None) -> Tensor:
        y = self.dropout(y)
        return y if scale is None else y * scale
