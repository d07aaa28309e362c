"""The input embedding of a step as a sum of rows of tables.

Axes: `r` row, `n` position, `k` neighbour, `s` value per step, `v` level, `e` width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, no_type_check

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from imagegen.generation.decode.compile import fast
from imagegen.model.embeddings import LinearPrediction, Neighbourhood, ValueAndSinusoid
from imagegen.model.transformer import NO_LABEL, ImageTransformer


@dataclass
class EmbeddingTables:
    """x[n] = place[n] + sum over k, s of table[k, s, level], or its last row where k is outside.

    Attributes:
        lags: steps from each neighbour to the predicted step.
        inside: whether each neighbour of a step is inside the image.
        table: a row for each level of each neighbour, the last one for a neighbour outside.
        place: a row for each position.
    """

    lags: Int64[np.ndarray, " k"]
    inside: Bool[np.ndarray, "n k"]
    table: Float[np.ndarray, "k s v_and_outside e"]
    place: Float[np.ndarray, "n e"]


@torch.no_grad()
def tables_of(embedding: ValueAndSinusoid | Neighbourhood) -> EmbeddingTables:
    """The tables of an embedding."""
    if isinstance(embedding, ValueAndSinusoid):
        return _of_value_and_sinusoid(embedding)
    return _of_neighbourhood(embedding)


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
    return EmbeddingTables(np.ones(1, dtype=np.int64), inside, table, place)


def _of_neighbourhood(embedding: Neighbourhood) -> EmbeddingTables:
    raster = embedding.raster
    spec, values, width = raster.spec, raster.values_per_step, embedding.d_model
    lags = cast(Tensor, embedding.lags).numpy()
    table = embedding.value.weight.double().numpy()
    table = table.reshape(len(lags), values, spec.levels + 1, width)
    table = table + _of_numbers(embedding, embedding.number.weight)
    step = torch.arange(raster.length)
    place = (
        embedding.row(step // raster.row_length)
        + embedding.column(step // raster.steps_per_pixel % spec.width)
        + embedding.channel(step % raster.steps_per_pixel)
        + embedding.number.bias
    )
    return EmbeddingTables(
        lags.astype(np.int64),
        cast(Tensor, embedding.valid).numpy(),
        np.ascontiguousarray(table, dtype=np.float32),
        place.float().numpy(),
    )


def _of_numbers(embedding: Neighbourhood, weight: Float[Tensor, "e n"]) -> np.ndarray:
    """What each level of each neighbour adds to a linear function of `Neighbourhood.numbers`."""
    spec, values = embedding.raster.spec, embedding.raster.values_per_step
    lags, (width, _) = len(cast(Tensor, embedding.lags)), weight.shape
    number = weight.double().numpy().T
    numbers = number[: lags * values].reshape(lags, values, 1, width)
    flags = number[lags * values :].reshape(lags, 1, 1, width)
    scaled = np.arange(spec.levels).reshape(1, 1, -1, 1) * (2 / (spec.levels - 1)) - 1
    # Nothing for a neighbour outside; once for one that is inside, whatever its level.
    table = np.zeros((lags, values, spec.levels + 1, width))
    table[:, :, :-1] = numbers * scaled
    table[:, :1, :-1] += flags
    return table


@torch.no_grad()
def prediction_table(
    prediction: LinearPrediction | None, embedding: ValueAndSinusoid | Neighbourhood
) -> Float[np.ndarray, "k s v_and_outside p"]:
    """A table as in `EmbeddingTables`, whose sum is the linear prediction; p is 0 without one."""
    values = embedding.raster.values_per_step
    if prediction is None:
        return np.zeros((0, values, embedding.raster.spec.levels + 1, 0), dtype=np.float32)
    table = _of_numbers(cast(Neighbourhood, embedding), prediction.weight)
    return np.ascontiguousarray(table, dtype=np.float32)


@torch.no_grad()
def condition_tables(
    model: ImageTransformer,
) -> tuple[Float[np.ndarray, "labels areas e"], Int64[np.ndarray, " n"]]:
    """What is added to the embedding for each label, and last for none, in each area.

    Returns:
        Those tables, and the area of each position.
    """
    width, length = model.embedding.d_model, model.raster.length
    area, first = np.zeros(length, dtype=np.int64), [0]
    if model.label is not None and model.label.areas is not None:
        area = cast(Tensor, model.label.area).numpy()
        first = np.unique(area, return_index=True)[1].tolist()
    labels = torch.tensor([*range(model.n_classes or 0), NO_LABEL])
    tables = [model.condition(labels, None, position, 1) for position in first]
    if tables[0] is None:
        return np.zeros((1, 1, width), dtype=np.float32), area
    return torch.cat(cast(list[Tensor], tables), dim=1).float().numpy(), area


@no_type_check
@fast()
def _add_neighbours(sequence, position, lags, inside, table, row):
    """Add the rows of `table` "k s v e" that the levels "n s" before a position name to one "e"."""
    outside = table.shape[2] - 1
    for k in range(lags.shape[0]):
        for s in range(table.shape[1]):
            level = outside
            if inside[position, k]:
                level = int(sequence[position - lags[k], s])
            added = table[k, s, level]
            for e in range(row.shape[0]):
                row[e] += added[e]


@no_type_check
@fast()
def predict(sequence, position, lags, inside, table, predicted, first, stop):
    """The linear prediction of a position from the values before it.

    Args:
        sequence, position, lags, inside, first, stop: as in `embed`.
        table: see `prediction_table`.
        predicted: "r p", written.
    """
    for r in range(first, stop):
        predicted[r] = 0.0
        _add_neighbours(sequence[r], position, lags, inside, table, predicted[r])


@no_type_check
@fast()
def embed(sequence, position, lags, inside, table, place, condition, area, label, x, first, stop):
    """The embedding of a position from the values before it.

    Args:
        sequence: levels "r n s" of all positions, known up to `position`.
        position: the predicted step.
        lags, inside, table, place: see `EmbeddingTables`.
        condition, area: see `condition_tables`.
        label: "r", the condition of each row.
        x: "r e", written.
        first, stop: the rows to go through.
    """
    for r in range(first, stop):
        row, added = x[r], condition[label[r], area[position]]
        for e in range(row.shape[0]):
            row[e] = place[position, e] + added[e]
        _add_neighbours(sequence[r], position, lags, inside, table, row)
