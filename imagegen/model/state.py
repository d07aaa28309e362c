"""A model's state, and how it is taken apart into named tensors and put together from others.

Axes: `b` batch, `s` values per step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtyping import Int64, UInt8
from torch import Tensor

from imagegen.attention.base import AttentionState, Position
from imagegen.model.canvas import Canvas


@dataclasses.dataclass
class ModelState:
    """What generation carries from one step to the next; it belongs to the caller.

    Attributes:
        position: number of steps whose distributions have been computed.
        recent: levels of the last steps, as many as the embedding looks back.
        layers: the attention states.
        labels: of the images, -1 for none; of models that know labels.
        orientation: of the images; of models that know several, see `imagegen.model.orientations`.
        canvas: the values known so far; of models that know any order.
    """

    position: Position
    recent: UInt8[Tensor, "b lookback s"]
    layers: list[AttentionState]
    labels: Int64[Tensor, " b"] | None = None
    orientation: Int64[Tensor, " b"] | None = None
    canvas: Canvas | None = None

    def tensors(self) -> list[Tensor]:
        """All tensors of the state."""
        tensors = [self.recent, *(tensor for layer in self.layers for tensor in layer.tensors())]
        told = [each for each in (self.labels, self.orientation) if each is not None]
        return [*tensors, *told, *([] if self.canvas is None else self.canvas.tensors())]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the state holds."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def clone(self) -> ModelState:
        """A copy that shares no memory with this state."""
        layers = [layer.clone() for layer in self.layers]
        labels = None if self.labels is None else self.labels.clone()
        orientation = None if self.orientation is None else self.orientation.clone()
        canvas = None if self.canvas is None else self.canvas.clone()
        return ModelState(self.position, self.recent.clone(), layers, labels, orientation, canvas)

    def repeat(self, times: int) -> ModelState:
        """Fork the state in new memory: image i becomes i * times to (i + 1) * times - 1."""
        layers = [layer.repeat(times) for layer in self.layers]
        recent = self.recent.repeat_interleave(times, dim=0)
        labels, orientation = (
            None if told is None else told.repeat_interleave(times, dim=0)
            for told in (self.labels, self.orientation)
        )
        canvas = None if self.canvas is None else self.canvas.repeat(times)
        return ModelState(self.position, recent, layers, labels, orientation, canvas)

    def select(self, rows: Int64[Tensor, " k"]) -> ModelState:
        """The state of these rows, in new memory; a row may come several times.

        Args:
            rows: on the device of the state.
        """
        chosen = {name: tensor[rows] for name, tensor in named_tensors(self)}
        selected: ModelState = with_tensors(self, chosen, "", self.position, len(rows))
        return selected


def named_tensors(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state and of the states in it, by the names of their inputs."""
    for name, value in _parts(state, prefix):
        if isinstance(value, Tensor):
            yield name, value
        elif not isinstance(value, int | None):
            yield from named_tensors(value, f"{name}.")


def with_tensors(
    initial: Any, given: Mapping[str, Tensor], prefix: str, position: Any, batch: Any
) -> Any:
    """A state like `initial` of the given tensors; whole numbers in it count positions."""

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return given[name] if name in given else value.new_zeros(batch, *value.shape[1:])
        if isinstance(value, int):
            return position
        return None if value is None else with_tensors(value, given, f"{name}.", position, batch)

    parts = [changed(name, value) for name, value in _parts(initial, prefix)]
    if isinstance(initial, list):
        return parts
    fields = [field.name for field in dataclasses.fields(initial)]
    return dataclasses.replace(initial, **dict(zip(fields, parts, strict=True)))


def _parts(state: Any, prefix: str) -> list[tuple[str, Any]]:
    """The entries of a list or the fields of a dataclass, by name."""
    if isinstance(state, list):
        return [(f"{prefix}{index}", value) for index, value in enumerate(state)]
    names = [field.name for field in dataclasses.fields(state)]
    return [(prefix + name, getattr(state, name)) for name in names]
