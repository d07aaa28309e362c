"""The input embedding of a step as a sum of rows of tables.

Axes: `r` row, `n` position or place, `k` neighbour, `s` value per step, `v` level, `e` width, `p`
predicted number, `condition` label and orientation.
"""

from __future__ import annotations

from typing import NamedTuple, cast, no_type_check

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor, nn

from imagegen.core.compiled.compile import fast
from imagegen.model.canvas import Canvas
from imagegen.model.embeddings import LinearPrediction, Neighbourhood, ValueAndSinusoid
from imagegen.model.known_neighbourhood import KnownNeighbourhood, KnownPrediction
from imagegen.model.transformer import NO_LABEL, ImageTransformer, ModelState


class EmbeddingTables(NamedTuple):
    """x[n] = place[n] + sum over k, s of table[k, s, level], or its last row where k is unknown.

    A neighbour is known where it is inside the image and its step comes before the predicted one.
    A model of any order has one neighbour more than shifts: the step before, wherever that was.

    Attributes:
        shifts: steps from the predicted place to each neighbour, in the raster.
        inside: whether each neighbour of a place is inside the image.
        table: a row for each level of each neighbour, the last one for an unknown neighbour.
        place: a row for each place.
        before: a row for each place of the step before; without rows where it does not matter.
    """

    shifts: Int64[np.ndarray, " shift"]
    inside: Bool[np.ndarray, "n shift"]
    table: Float32[np.ndarray, "k s v_and_unknown e"]
    place: Float32[np.ndarray, "n e"]
    before: Float32[np.ndarray, "n_or_0 e"]


@torch.no_grad()
def tables_of(embedding: nn.Module) -> EmbeddingTables:
    """The tables of an embedding, one of `KNOWN`."""
    if isinstance(embedding, ValueAndSinusoid):
        return _of_value_and_sinusoid(embedding)
    return _of_neighbours(cast(Neighbourhood | KnownNeighbourhood, embedding))


KNOWN = (ValueAndSinusoid, Neighbourhood, KnownNeighbourhood)
"""Embeddings that have tables."""


def _of_value_and_sinusoid(embedding: ValueAndSinusoid) -> EmbeddingTables:
    spec, values = embedding.raster.spec, embedding.raster.values_per_step
    length, half = embedding.raster.length, embedding.d_model // 2
    weight = embedding.value.weight.float().numpy()
    table = np.zeros((1, values, spec.levels + 1, embedding.d_model), dtype=np.float32)
    table[0, :, :-1, :half] = weight[:-1].reshape(values, spec.levels, half)
    # Before the first step, each value has the embedding of the start.
    table[0, :, -1, :half] = weight[-1]
    place = np.zeros((length, embedding.d_model), dtype=np.float32)
    place[:, half:] = cast(Tensor, embedding.sinusoid).float().numpy()
    inside = np.arange(length)[:, None] > 0
    return EmbeddingTables(-np.ones(1, dtype=np.int64), inside, table, place, place[:0])


def _of_neighbours(embedding: Neighbourhood | KnownNeighbourhood) -> EmbeddingTables:
    raster = embedding.raster
    spec, values, width = raster.spec, raster.values_per_step, embedding.d_model
    table = embedding.value.weight.double().numpy().reshape(-1, values, spec.levels + 1, width)
    table = table + _of_numbers(embedding, embedding.number.weight)
    step = torch.arange(raster.length)
    row, column = step // raster.row_length, step // raster.steps_per_pixel % spec.width
    channel = step % raster.steps_per_pixel
    place = embedding.row(row) + embedding.column(column) + embedding.channel(channel)
    place = place + embedding.number.bias
    if isinstance(embedding, KnownNeighbourhood):
        shifts, inside = cast(Tensor, embedding.shifts), cast(Tensor, embedding.inside)
        before = embedding.row_before(row) + embedding.column_before(column)
        # What is drawn was not visible.
        place = place + embedding.kept.weight[0]
    else:
        shifts, inside = -cast(Tensor, embedding.lags), cast(Tensor, embedding.valid)
        before = place[:0]
    return EmbeddingTables(
        shifts.numpy().astype(np.int64),
        inside.numpy(),
        np.ascontiguousarray(table, dtype=np.float32),
        place.float().numpy(),
        before.float().numpy(),
    )


def _of_numbers(
    embedding: Neighbourhood | KnownNeighbourhood, weight: Float[Tensor, "e n"]
) -> Float[np.ndarray, "k s v_and_unknown e"]:
    """What each level of each neighbour adds to a linear function of the numbers that are seen."""
    spec, values = embedding.raster.spec, embedding.raster.values_per_step
    width, numbers = weight.shape
    count = numbers // (values + 1)
    number = weight.double().numpy().T
    flags = number[count * values :].reshape(count, 1, 1, width)
    scaled = np.arange(spec.levels).reshape(1, 1, -1, 1) * (2 / (spec.levels - 1)) - 1
    # Nothing for an unknown neighbour; once for one that is known, whatever its level.
    table = np.zeros((count, values, spec.levels + 1, width))
    table[:, :, :-1] = number[: count * values].reshape(count, values, 1, width) * scaled
    table[:, :1, :-1] += flags
    return table


class PredictionTables(NamedTuple):
    """Tables as in `EmbeddingTables`, whose sum is the linear prediction, for each pattern.

    Attributes:
        table: without numbers p where there is no prediction.
        adjacent: bit i of the pattern is whether this neighbour is known; -1 for none.
    """

    table: Float32[np.ndarray, "patterns k s v_and_unknown p"]
    adjacent: Int64[np.ndarray, " bits"]


@torch.no_grad()
def prediction_tables(
    prediction: LinearPrediction | None, embedding: nn.Module
) -> PredictionTables:
    """The tables of a linear prediction from what an embedding sees."""
    none = np.zeros(0, dtype=np.int64)
    if prediction is None:
        return PredictionTables(np.zeros((1, 0, 1, 1, 0), dtype=np.float32), none)
    seen = cast(Neighbourhood | KnownNeighbourhood, embedding)
    tables = [
        _of_numbers(seen, weight).astype(np.float32)
        for weight in prediction.weight.split(seen.raster.values_per_step)
    ]
    adjacent = np.array(prediction.adjacent) if isinstance(prediction, KnownPrediction) else none
    return PredictionTables(np.stack(tables), adjacent.astype(np.int64))


@torch.no_grad()
def condition_tables(
    model: ImageTransformer,
) -> tuple[Float[np.ndarray, "condition areas e"], Int64[np.ndarray, " n"]]:
    """What is added to the embedding for each label and orientation, in each area.

    Returns:
        Those tables, of which `condition_of` names the rows, and the area of each place: places
        are in one where they are in the same area of a label in every orientation.
    """
    width, length = model.embedding.d_model, model.raster.length
    area, first = np.zeros(length, dtype=np.int64), np.zeros(1, dtype=np.int64)
    if model.label is not None and model.label.areas is not None:
        every = cast(Tensor, model.label.area).numpy()
        _, first, area = np.unique(every, axis=1, return_index=True, return_inverse=True)
    labels = torch.tensor([*range(model.n_classes or 0), NO_LABEL])
    orientation = torch.arange(model.orders).repeat(len(labels))
    labels = labels.repeat_interleave(model.orders)
    table = model.condition(labels, orientation, torch.from_numpy(first)[None])
    if table is None:
        return np.zeros((1, 1, width), dtype=np.float32), area
    return table.expand(-1, len(first), -1).float().numpy(), area.reshape(-1)


def condition_of(
    model: ImageTransformer, state: ModelState, part: slice
) -> Int64[np.ndarray, " r"]:
    """The row of `condition_tables` for each of some rows of a state."""
    none, count = model.n_classes or 0, part.stop - part.start
    label = orientation = np.zeros(count, dtype=np.int64)
    if model.n_classes is not None:
        label = np.full(count, none) if state.labels is None else state.labels[part].numpy()
    if state.orientation is not None:
        orientation = state.orientation[part].numpy()
    return np.where(label < 0, none, label) * model.orders + orientation


class Order(NamedTuple):
    """The order of the steps of some rows, or one for all rows.

    Attributes:
        places: of the steps.
        ranks: the steps at places.
    """

    places: Int64[np.ndarray, "r_or_1 n"]
    ranks: Int64[np.ndarray, "r_or_1 n"]


def order_of(canvas: Canvas | None, part: slice, length: int) -> Order:
    """The order of some rows of a state, or that of the raster."""
    if canvas is None:
        raster = np.arange(length)[None]
        return Order(raster, raster)
    step = torch.arange(length)
    return Order(canvas.places(step)[part].numpy(), (canvas.rank_shift[part] + step).numpy())


@no_type_check
@fast()
def _step_of(k, position, place, ranks, shifts, inside):
    """The step that neighbour k was taken at, or -1 where it is unknown."""
    if k == shifts.shape[0]:
        return position - 1
    if not inside[place, k]:
        return -1
    step = ranks[place + shifts[k]]
    return step if step < position else -1


@no_type_check
@fast()
def _add_neighbours(sequence, position, place, ranks, shifts, inside, table, row):
    """Add the rows of `table` "k s v e" that the levels "n s" before a position name to one "e"."""
    unknown = table.shape[2] - 1
    for k in range(table.shape[0]):
        step = _step_of(k, position, place, ranks, shifts, inside)
        for s in range(table.shape[1]):
            level = int(sequence[step, s]) if step >= 0 else unknown
            added = table[k, s, level]
            for e in range(row.shape[0]):
                row[e] += added[e]


@no_type_check
@fast()
def predict(sequence, position, order, tables, prediction, predicted, first, stop):
    """The linear prediction of a position from the values before it.

    Args:
        sequence, position, order, tables, first, stop: as in `embed`.
        prediction: see `PredictionTables`.
        predicted: "r p", written.
    """
    shifts, inside = tables.shifts, tables.inside
    for r in range(first, stop):
        own = r if order.places.shape[0] > 1 else 0
        place, ranks = order.places[own, position], order.ranks[own]
        pattern = 0
        for bit in range(prediction.adjacent.shape[0]):
            k = prediction.adjacent[bit]
            if k >= 0 and _step_of(k, position, place, ranks, shifts, inside) >= 0:
                pattern |= 1 << bit
        predicted[r] = 0.0
        table = prediction.table[pattern]
        _add_neighbours(sequence[r], position, place, ranks, shifts, inside, table, predicted[r])


@no_type_check
@fast()
def embed(sequence, position, order, tables, condition, area, label, x, first, stop):
    """The embedding of a position from the values before it.

    Args:
        sequence: levels "r n s" of all positions, known up to `position`; with fewer rows than x,
            each of which stands for all rows at a distance of a multiple of their number.
        position: the predicted step.
        order: of the steps, see `Order`.
        tables: see `EmbeddingTables`.
        condition, area: see `condition_tables`.
        label: "r", the condition of each row; see `condition_of`.
        x: "r e", written.
        first, stop: the rows to go through.
    """
    for r in range(first, stop):
        own = r if order.places.shape[0] > 1 else 0
        place, ranks = order.places[own, position], order.ranks[own]
        row, added = x[r], condition[label[r], area[place]]
        for e in range(row.shape[0]):
            row[e] = tables.place[place, e] + added[e]
        if position > 0 and tables.before.shape[0] > 0:
            came = tables.before[order.places[own, position - 1]]
            for e in range(row.shape[0]):
                row[e] += came[e]
        known = sequence[r % sequence.shape[0]]
        _add_neighbours(
            known, position, place, ranks, tables.shifts, tables.inside, tables.table, row
        )
