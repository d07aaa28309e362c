"""What the model is given of the values before each step, and the image's label.

Axes: `b` batch, `n` position, `w` position in a window, `s` values per step, `e` model width, `k`
neighbour or label, `a` area.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int, Int64, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.core.errors import UserError
from imagegen.model.raster import Raster

Seen = TypeVar("Seen")


class InputEmbedding(nn.Module, ABC, Generic[Seen]):
    """Embeds steps from what is seen of those before, so that both forms share one path.

    What is seen, `Seen`, is a window of the sequence: the values of the `lookback` steps before the
    first of the embedded steps, then those of these steps but for the last one; what lies before
    the first step of all is ignored. Of models that know any order it is a `Canvas`.

    Args:
        d_model: width `e` of the result.
        raster: the order of the values.

    Attributes:
        lookback: how many steps before the predicted one are looked at; the model's state keeps
            that many, whatever the length of the sequence.
        neighbour_lags: steps from each neighbouring pixel that is seen to the predicted step.
        n_numbers: how many numbers `forward` gives beside the embedding of a step.
    """

    lookback: int
    neighbour_lags: tuple[int, ...] = ()
    n_numbers = 0

    def __init__(self, d_model: int, raster: Raster) -> None:
        super().__init__()
        self.d_model = d_model
        self.raster = raster

    def lag(self, row: int, column: int) -> int:
        """Steps from a neighbouring pixel to the predicted step, of the same channel."""
        return (-row * self.raster.spec.width - column) * self.raster.steps_per_pixel

    @abstractmethod
    def forward(
        self, seen: Seen, step: Int64[Tensor, " n"]
    ) -> tuple[Float[Tensor, "b n e"], Float[Tensor, "b n n_numbers"]]:
        """Embeddings for the prediction of steps that follow each other, and the numbers seen.

        The numbers are the neighbours' values from -1 to 1, 0 where they are not seen, as outside
        of the image; then 1 for each one that is.

        Args:
            seen: see the class.
            step: the predicted steps.
        """


class ValueAndSinusoid(InputEmbedding[Tensor]):
    """The paper's input: a learned embedding of the value before, beside a fixed sinusoid.

    Each takes half of the width (Katharopoulos et al., 2020, with the sinusoid of Vaswani et al.,
    2017, section 3.5). The first step has a learned embedding of its own. The embeddings of several
    values per step, one table each, are added.
    """

    lookback = 1

    def __init__(self, d_model: int, raster: Raster) -> None:
        super().__init__(d_model, raster)
        if d_model % 4:
            raise UserError(f"model.d_model={d_model} must be a multiple of 4 for the sinusoid.")
        values = raster.values_per_step
        self.start = values * raster.spec.levels
        self.value = nn.Embedding(self.start + 1, d_model // 2)
        table = torch.arange(values, dtype=torch.int32) * raster.spec.levels
        self.register_buffer("table", table, persistent=False)
        position = torch.arange(raster.length).unsqueeze(-1)
        angle = position * torch.exp(
            torch.arange(0, d_model // 2, 2) * (-math.log(10_000.0) / (d_model // 2))
        )
        sinusoid = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
        self.register_buffer("sinusoid", sinusoid, persistent=False)

    def forward(
        self, window: UInt8[Tensor, "b w s"], step: Int64[Tensor, " n"]
    ) -> tuple[Float[Tensor, "b n e"], Float[Tensor, "b n n_numbers"]]:
        index = window.int() + cast(Tensor, self.table)
        index = torch.where((step == 0).unsqueeze(-1), self.start, index)
        value = self.value(index).sum(dim=-2)
        sinusoid = cast(Tensor, self.sinusoid)[step]
        embedded = torch.cat([value, sinusoid.expand_as(value)], dim=-1)
        return embedded, embedded[..., :0]


DEFAULT_NEIGHBOURS = (
    (0, -1),
    (0, -2),
    (0, -3),
    (-1, 0),
    (-1, -1),
    (-1, 1),
    (-1, -2),
    (-1, 2),
    (-2, 0),
)


class NeighbourEmbedding(InputEmbedding[Seen]):
    """What embeddings of neighbours have in common: their levels, as words and as numbers.

    Each neighbour's level has a learned embedding, and enters as a number too, for an embedding
    alone has to learn that 127 lies next to 128. Row, column and channel of the predicted step are
    embedded (Sparse Transformer, Child et al., 2019, section 5.2).
    """

    def make_tables(self, count: int) -> None:
        """The weights for so many neighbours `k`."""
        raster, d_model = self.raster, self.d_model
        spec, values = raster.spec, raster.values_per_step
        table = torch.arange(count * values, dtype=torch.int32) * (spec.levels + 1)
        self.register_buffer("table", table.view(count, values), persistent=False)

        self.value = nn.EmbeddingBag(table.numel() * (spec.levels + 1), d_model, mode="sum")
        self.n_numbers = count * (values + 1)
        self.number = nn.Linear(self.n_numbers, d_model)
        self.row = nn.Embedding(spec.height, d_model)
        self.column = nn.Embedding(spec.width, d_model)
        self.channel = nn.Embedding(raster.steps_per_pixel, d_model)
        for embedding in (self.value, self.row, self.column, self.channel):
            nn.init.normal_(embedding.weight, std=d_model**-0.5)

    def embedded(
        self,
        level: UInt8[Tensor, "b n k s"],
        known: Bool[Tensor, "#b n k"],
        place: Int64[Tensor, "#b n"],
    ) -> tuple[Float[Tensor, "b n e"], Float[Tensor, "b n n_numbers"]]:
        """The embeddings, and the numbers seen.

        Args:
            level: of the neighbours; any where they are unknown.
            known: whether each neighbour is seen.
            place: the predicted steps, in the raster.
        """
        raster, table = self.raster, cast(Tensor, self.table)
        index = torch.where(known.unsqueeze(-1), level.int(), raster.spec.levels) + table
        value = self._summed(index.flatten(2))
        where = (
            self.row(place // raster.row_length)
            + self.column(place // raster.steps_per_pixel % raster.spec.width)
            + self.channel(place % raster.steps_per_pixel)
        )
        numbers = self._numbers(level, known)
        return value + self.number(numbers) + where, numbers

    def _summed(self, index: Int[Tensor, "b n k"]) -> Float[Tensor, "b n e"]:
        """The sum of the embeddings of each step."""
        if index.device.type == "mps":  # PyTorch 2.9 has no sums in one operation there.
            return F.embedding(index, self.value.weight).sum(dim=-2)
        return self.value(index.flatten(0, 1)).unflatten(0, index.shape[:2])

    def _numbers(self, level: Tensor, known: Tensor) -> Tensor:
        dtype = self.number.weight.dtype
        number = (level.to(dtype) * (2 / (self.raster.spec.levels - 1)) - 1) * known.unsqueeze(-1)
        flags = known.to(dtype).expand(number.shape[:3])
        return torch.cat([number.flatten(2), flags], dim=-1)


def check_neighbours(neighbours: Sequence[Sequence[int]]) -> None:
    """Refuse offsets of pixels that do not come before the predicted one.

    Raises:
        UserError: for those.
    """
    for offset in neighbours:
        if len(offset) != 2 or not (offset[0] < 0 or (offset[0] == 0 and offset[1] < 0)):
            raise UserError(
                f"model.embedding.neighbours has {list(offset)}, but each must be [row, column]"
                " of a pixel before the predicted one: row < 0, or row 0 and column < 0."
            )


class Neighbourhood(NeighbourEmbedding[Tensor]):
    """Two-dimensional context: the earlier pixels around the predicted one, and its place.

    A pixel sees all channels of its neighbours; a sub-pixel sees its own channel in the
    neighbouring pixels, and the sub-pixels just before it. The state keeps the last rows: its size
    depends on the image's width, never on the length.

    Args:
        neighbours: offsets (row, column) in pixels, each of them before the predicted pixel.

    Raises:
        UserError: for a neighbour that does not come before the predicted pixel.
    """

    def __init__(
        self,
        d_model: int,
        raster: Raster,
        neighbours: Sequence[Sequence[int]] = DEFAULT_NEIGHBOURS,
    ) -> None:
        super().__init__(d_model, raster)
        check_neighbours(neighbours)
        spec = raster.spec
        # The steps just before are seen across the end of a row too, so that no value waits to be
        # seen. A neighbour outside of every image would only ever be missing.
        previous = list(range(1, max(2, raster.steps_per_pixel)))
        pixels = [
            (row, column)
            for row, column in neighbours
            if -row < spec.height
            and abs(column) < spec.width
            and self.lag(row, column) not in previous
        ]
        lags = [self.lag(row, column) for row, column in pixels] + previous
        self.lookback = max(lags)
        self.neighbour_lags = tuple(lags)
        self.register_buffer("lags", torch.tensor(lags), persistent=False)
        self.register_buffer("valid", self._validity(pixels, previous), persistent=False)
        self.make_tables(len(lags))

    def _validity(
        self, pixels: Sequence[tuple[int, int]], previous: Sequence[int]
    ) -> Bool[Tensor, "length k"]:
        """Whether each neighbour of each step lies inside the image."""
        spec = self.raster.spec
        step = torch.arange(self.raster.length)
        row = step // self.raster.row_length
        column = step // self.raster.steps_per_pixel % spec.width
        inside = [
            (row + dy >= 0) & (column + dx >= 0) & (column + dx < spec.width) for dy, dx in pixels
        ]
        return torch.stack(inside + [step >= lag for lag in previous], dim=-1)

    def forward(
        self, window: UInt8[Tensor, "b w s"], step: Int64[Tensor, " n"]
    ) -> tuple[Float[Tensor, "b n e"], Float[Tensor, "b n n_numbers"]]:
        source = torch.arange(self.lookback, self.lookback + len(step), device=window.device)
        level = window[:, source.unsqueeze(-1) - cast(Tensor, self.lags)]
        inside = cast(Tensor, self.valid)[step].unsqueeze(0)
        return self.embedded(level, inside, step.unsqueeze(0))


class LabelEmbedding(nn.Module):
    """A learned vector of each label, and one for each area of the image.

    Without the areas, what a label means at a place has to be worked out by the layers, and as a
    label is worth few of an image's bits, they learn that slowly (benchmarks/results/quality.md).

    Args:
        n_classes: number of labels.
        d_model: width `e` of the result.
        raster: the order of the values.
        grid: the image has grid x grid areas, or as many as pixels along a shorter side; 1 is
            without them.

    Attributes:
        weight: of each label, and of "no label" in the last row; "k e".
        areas: what is added to that in each area; "k a e", or None.

    Raises:
        UserError: for fewer than one label.
    """

    def __init__(self, n_classes: int, d_model: int, raster: Raster, grid: int = 1) -> None:
        super().__init__()
        if n_classes < 1:
            raise UserError(f"n_classes={n_classes} must be at least 1.")
        self.n_classes = n_classes
        self.weight = nn.Parameter(torch.empty(n_classes + 1, d_model))
        nn.init.normal_(self.weight, std=d_model**-0.5)
        spec = raster.spec
        rows, columns = min(grid, spec.height), min(grid, spec.width)
        pixel = torch.arange(raster.length) // raster.steps_per_pixel
        row, column = pixel // spec.width, pixel % spec.width
        area = row * rows // spec.height * columns + column * columns // spec.width
        self.register_buffer("area", area, persistent=False)
        self.areas = None
        if rows * columns > 1:
            self.areas = nn.Parameter(torch.zeros(n_classes + 1, rows * columns, d_model))

    def forward(
        self, labels: Int64[Tensor, " b"], place: Int64[Tensor, "#b n"]
    ) -> Float[Tensor, "b n_or_1 e"]:
        """What is added to the input of steps, or the same of all steps.

        Args:
            labels: 0 to n_classes - 1, or below 0 for no label.
            place: the steps, in the raster.
        """
        row = torch.where(labels < 0, self.n_classes, labels)
        whole = nn.functional.embedding(row, self.weight).unsqueeze(1)
        if self.areas is None:
            return whole
        index = row.unsqueeze(1) * self.areas.shape[1] + cast(Tensor, self.area)[place]
        return whole + nn.functional.embedding(index, self.areas.flatten(0, 1))
