"""A model's state taken apart into named tensors, and put together from others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from jaxtyping import Int64
from torch import Tensor

State = TypeVar("State")


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


def select_rows(state: State, rows: Int64[Tensor, " k"], position: int) -> State:
    """The state of these rows, in new memory; a row may come several times.

    Args:
        state: of a model, `position` steps of which have been taken.
        rows: on the device of the state.
    """
    chosen = {name: tensor[rows] for name, tensor in named_tensors(state)}
    selected: State = with_tensors(state, chosen, "", position, len(rows))
    return selected


def _parts(state: Any, prefix: str) -> list[tuple[str, Any]]:
    """The entries of a list or the fields of a dataclass, by name."""
    if isinstance(state, list):
        return [(f"{prefix}{index}", value) for index, value in enumerate(state)]
    names = [field.name for field in dataclasses.fields(state)]
    return [(prefix + name, getattr(state, name)) for name in names]
