"""The contract that every attention mechanism keeps.

Axes: `b` batch, `n` position, `h` head, `d` query/key feature, `m` value feature, `e` model width.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from imagegen.core.errors import UserError

DEFAULT_CHUNK = 64
"""Positions that a chunked form takes at once."""

Self = TypeVar("Self", bound="AttentionState")

if TYPE_CHECKING:
    Position = int
else:  # A tensor without axes while a step is exported, whose graph holds for all positions.
    Position = int | Int64[Tensor, ""]


@dataclasses.dataclass
class AttentionState:
    """What a mechanism remembers of the positions it has seen; it belongs to the caller.

    Subclasses are dataclasses whose tensor fields have the batch as their first axis.
    """

    def tensors(self) -> list[Tensor]:
        """The tensors of this state."""
        return [value for value in self._fields().values() if isinstance(value, Tensor)]

    def clone(self: Self) -> Self:
        """A copy that shares no memory with this state."""
        return self._map(torch.Tensor.clone)

    def repeat(self: Self, times: int) -> Self:
        """Fork the state in new memory: image i becomes i * times to (i + 1) * times - 1."""
        return self._map(lambda tensor: tensor.repeat_interleave(times, dim=0))

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _map(self: Self, function: Any) -> Self:
        changed = {
            name: function(value)
            for name, value in self._fields().items()
            if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **changed)


State = TypeVar("State", bound=AttentionState)


class CausalAttention(nn.Module, ABC, Generic[State]):
    """Multi-head causal attention with a parallel and a recurrent form over one set of weights.

    Args:
        d_model: model width `e`.
        n_heads: number of heads `h`.
        head_dim: query, key and value features of a head; d_model / n_heads by default.
        row_length: positions in a row of the image, for mechanisms that know two dimensions.
        layer: index of the layer, from 0, for mechanisms that differ between layers.

    Attributes:
        constant_state: whether the state has the same size at every position.
        needs_raster: whether positions at fixed distances are taken for neighbours in the image,
            as they are in the order of the raster only.

    Raises:
        UserError: for sizes below one, or a width that the heads do not divide.
    """

    constant_state: bool = True
    needs_raster: bool = False

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        row_length: int | None = None,
        layer: int = 0,
    ) -> None:
        super().__init__()
        if d_model < 1 or n_heads < 1 or (head_dim is not None and head_dim < 1):
            raise UserError(
                f"d_model={d_model}, n_heads={n_heads} and head_dim={head_dim} must be at least 1."
            )
        if head_dim is None and d_model % n_heads:
            raise UserError(
                f"n_heads={n_heads} does not divide d_model={d_model}; "
                "choose another number of heads or set head_dim."
            )
        self.d_model = d_model
        self.n_heads = n_heads
        self.head_dim = head_dim or d_model // n_heads
        self.row_length = row_length
        self.layer = layer

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "b n e"], state: State | None = None
    ) -> tuple[Float[Tensor, "b n e"], State]:
        """All positions at once, continuing from `state`; returns the state after the last one."""

    @abstractmethod
    def step(self, x: Float[Tensor, "b e"], state: State) -> tuple[Float[Tensor, "b e"], State]:
        """One position; may reuse the memory of `state` where no gradient is needed."""

    @abstractmethod
    def initial_state(self, batch_size: int) -> State:
        """The state before the first position."""
