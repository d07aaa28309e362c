"""What the model is given: the order of the values, and what it sees of those before each.

Beside that: a linear prediction of the next values from those seen.

Axes: `b` batch, `h w c` height, width, channel, `n` position, `w` position in a window, `s` values
per step, `f` numbers seen, `e` model width, `k` neighbour.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Int64, Integer, Shaped, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec

TOKENS = ("subpixel", "pixel")


@dataclass(frozen=True)
class Raster:
    """The order in which a model meets the values of an image.

    With `subpixel` tokens a step is one value, and a row is r g b r g b ...; with `pixel` tokens a
    step is a pixel, all channels of it. For grey images both are the same.

    Raises:
        UserError: for another kind of token.
    """

    spec: ImageSpec
    tokens: str = "subpixel"

    def __post_init__(self) -> None:
        if self.tokens not in TOKENS:
            raise UserError(
                f"model.tokens={self.tokens} is unknown; choose one of {', '.join(TOKENS)}."
            )

    @property
    def values_per_step(self) -> int:
        """Number of values `s` that a step predicts."""
        return self.spec.channels if self.tokens == "pixel" else 1

    @property
    def length(self) -> int:
        """Number of steps `n` of an image."""
        return self.spec.dims // self.values_per_step

    @property
    def steps_per_pixel(self) -> int:
        """Number of steps that one pixel takes."""
        return self.spec.channels // self.values_per_step

    @property
    def row_length(self) -> int:
        """Number of steps of one row of an image."""
        return self.spec.width * self.steps_per_pixel

    def kept_steps(self, visible: Bool[Tensor, "b h w"]) -> Int64[Tensor, " b"]:
        """How many steps the visible pixels take."""
        return visible.flatten(1).sum(dim=1) * self.steps_per_pixel

    def ranks(self, visible: Bool[Tensor, "b h w"]) -> Int64[Tensor, "b n"]:
        """When each step of the raster is taken if the visible pixels come first.

        The visible pixels and then the others are each in the order of the raster.
        """
        kept = visible.flatten(1).long()
        missing = 1 - kept
        after = kept.sum(dim=1, keepdim=True) + missing.cumsum(dim=1)
        pixel = torch.where(kept.bool(), kept.cumsum(dim=1), after) - 1
        steps = torch.arange(self.steps_per_pixel, device=visible.device)
        return (pixel.unsqueeze(-1) * self.steps_per_pixel + steps).flatten(1)

    def places(self, visible: Bool[Tensor, "b h w"]) -> Int64[Tensor, "b n"]:
        """The step of the raster that is taken n-th, the inverse of `ranks`."""
        ranks = self.ranks(visible)
        steps = torch.arange(ranks.shape[1], device=ranks.device)
        return torch.empty_like(ranks).scatter_(1, ranks, steps.expand_as(ranks))

    def to_sequence(
        self, images: UInt8[Tensor, "b h w c"], visible: Bool[Tensor, "b h w"] | None = None
    ) -> UInt8[Tensor, "b n s"]:
        """Levels of images, in the order of the steps. Takes the first rows of an image as well.

        Args:
            images: levels.
            visible: which pixels come first, of whole images; in the order of the raster by
                default.
        """
        sequence = rearrange(images, "b h w (p s) -> b (h w p) s", s=self.values_per_step)
        return sequence if visible is None else _gathered(sequence, self.places(visible))

    def to_images(
        self, sequence: Integer[Tensor, "b n s"], visible: Bool[Tensor, "b h w"] | None = None
    ) -> UInt8[Tensor, "b h w c"]:
        """The inverse of `to_sequence`."""
        if visible is not None:
            sequence = _gathered(sequence, self.ranks(visible))
        return self.arranged(sequence).byte()

    def arranged(self, sequence: Shaped[Tensor, "b n s"]) -> Shaped[Tensor, "b h w c"]:
        """A number for each value, in the order of the raster, at the places of the values."""
        return rearrange(
            sequence, "b (h w p) s -> b h w (p s)", w=self.spec.width, p=self.steps_per_pixel
        )


def _gathered(sequence: Tensor, steps: Tensor) -> Tensor:
    """sequence[b, steps[b, n]], "b n s"."""
    return sequence.gather(1, steps.unsqueeze(-1).expand_as(sequence))


Seen = TypeVar("Seen")


class InputEmbedding(nn.Module, ABC, Generic[Seen]):
    """Embeds steps from what is seen of those before, so that both forms share one path.

    What is seen, `Seen`, is a window of the sequence: the values of the `lookback` steps before the
    first of the embedded steps, then those of these steps but for the last one; what comes before
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

    Each neighbour's level has a learned embedding, and enters as a number too, because an embedding
    alone has to learn that 127 is next to 128. Row, column and channel of the predicted step are
    embedded (Sparse Transformer, Child et al., 2019, section 5.2).

    Args:
        neighbours: offsets (row, column) in pixels, each of them before the predicted pixel.

    Raises:
        UserError: for a neighbour that does not come before the predicted pixel.
    """

    def __init__(self, d_model: int, raster: Raster, neighbours: Sequence[Sequence[int]]) -> None:
        super().__init__(d_model, raster)
        for offset in neighbours:
            if len(offset) != 2 or not (offset[0] < 0 or (offset[0] == 0 and offset[1] < 0)):
                raise UserError(
                    f"model.embedding.neighbours has {list(offset)}, but each must be [row, column]"
                    " of a pixel before the predicted one: row < 0, or row 0 and column < 0."
                )

    def inside_image(self, pixels: Sequence[tuple[int, int]]) -> list[Bool[Tensor, " length"]]:
        """Whether the neighbour at each offset is inside the image, of each step of the raster."""
        spec = self.raster.spec
        step = torch.arange(self.raster.length)
        row = step // self.raster.row_length
        column = step // self.raster.steps_per_pixel % spec.width
        return [
            (row + dy >= 0)
            & (row + dy < spec.height)
            & (column + dx >= 0)
            & (column + dx < spec.width)
            for dy, dx in pixels
        ]

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
        super().__init__(d_model, raster, neighbours)
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
        step = torch.arange(raster.length)
        valid = torch.stack(self.inside_image(pixels) + [step >= lag for lag in previous], dim=-1)
        self.register_buffer("valid", valid, persistent=False)
        self.make_tables(len(lags))

    def forward(
        self, window: UInt8[Tensor, "b w s"], step: Int64[Tensor, " n"]
    ) -> tuple[Float[Tensor, "b n e"], Float[Tensor, "b n n_numbers"]]:
        source = torch.arange(self.lookback, self.lookback + len(step), device=window.device)
        level = window[:, source.unsqueeze(-1) - cast(Tensor, self.lags)]
        inside = cast(Tensor, self.valid)[step].unsqueeze(0)
        return self.embedded(level, inside, step.unsqueeze(0))


# Least squares over small photographs, rounded; their sum is 1.
FIRST_WEIGHTS = {(0, -1): 0.8, (-1, 0): 0.6, (-1, -1): -0.5, (-1, 1): 0.1}


class LinearPrediction(nn.Module):
    """A linear function of the numbers that the embedding sees, for each value of a step.

    What the output distribution has to add is then as small as the residual of a predictive coder,
    from the first training step on. At first each value is predicted from the same channel of the
    pixels to the left and above, and from no more of them than the embedding sees.

    Args:
        embedding: gives the numbers `f`.

    Attributes:
        weight: "s f".
    """

    def __init__(self, embedding: InputEmbedding[Any]) -> None:
        super().__init__()
        values, lags = embedding.raster.values_per_step, embedding.neighbour_lags
        self.weight = nn.Parameter(torch.zeros(values, embedding.n_numbers))
        with torch.no_grad():
            for offset, weight in FIRST_WEIGHTS.items():
                lag = embedding.lag(*offset)
                if lag in lags:
                    first = lags.index(lag) * values
                    self.weight[:, first : first + values].fill_diagonal_(weight)

    def forward(self, numbers: Float[Tensor, "b n f"]) -> Float[Tensor, "b n s"]:
        """Values from -1 to 1 or a little beyond.

        Args:
            numbers: that the embedding gives.
        """
        with torch.autocast(numbers.device.type, enabled=False):  # see `OutputHead.forward`
            return F.linear(numbers, self.weight)
