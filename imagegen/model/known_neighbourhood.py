"""What a step sees where any pixels may be known: its neighbours on all sides.

Axes: `b` batch, `n` position, `s` values per step, `e` model width, `f` numbers seen, `k` neighbour
or pattern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from imagegen.core.build import build, resolve_target
from imagegen.core.errors import UserError
from imagegen.model.canvas import Canvas
from imagegen.model.embeddings import (
    DEFAULT_NEIGHBOURS,
    InputEmbedding,
    LinearPrediction,
    NeighbourEmbedding,
    Neighbourhood,
    Raster,
)

ORDERS = ("raster", "any")

ADJACENT = ((0, -1), (-1, 0), (0, 1), (1, 0))
"""Offsets (row, column) of the four pixels that share an edge with the predicted one."""


class KnownNeighbourhood(NeighbourEmbedding[Canvas]):
    """The known pixels on all sides of the predicted one, and how the sequence came there.

    A neighbour is known where its own step comes before the predicted one. A pixel sees all
    channels of its neighbours; a sub-pixel sees its own channel in the neighbouring pixels, and
    the earlier channels of its own pixel. Beside them a step sees the value and the place of the
    step before, so that the layers are told every value, and whether its own pixel was visible.

    Args:
        neighbours: offsets (row, column) as of a `Neighbourhood`; they are taken in all eight
            directions that turning and mirroring gives. The nine of the default become 24.

    Attributes:
        adjacent: which neighbours the offsets of `ADJACENT` are; -1 for none.

    Raises:
        UserError: as `Neighbourhood`.
    """

    lookback = 0

    def __init__(
        self,
        d_model: int,
        raster: Raster,
        neighbours: Sequence[Sequence[int]] = DEFAULT_NEIGHBOURS,
    ) -> None:
        super().__init__(d_model, raster, neighbours)
        spec = raster.spec
        pixels = [
            (row, column)
            for row, column in _on_all_sides(neighbours)
            if abs(row) < spec.height and abs(column) < spec.width
        ]
        own = range(1, raster.steps_per_pixel)
        lags = [self.lag(row, column) for row, column in pixels] + list(own)
        self.adjacent = tuple(
            pixels.index(offset) if offset in pixels else -1 for offset in ADJACENT
        )
        # The step before is the last neighbour; its lag in the raster differs from step to step.
        self.neighbour_lags = tuple(lags)
        self.register_buffer("shifts", -torch.tensor(lags, dtype=torch.int64), persistent=False)
        channel = torch.arange(raster.length) % raster.steps_per_pixel
        inside = self.inside_image(pixels) + [channel >= lag for lag in own]
        table = torch.stack(inside, dim=-1) if inside else torch.ones(raster.length, 0).bool()
        self.register_buffer("inside", table, persistent=False)
        self.make_tables(len(lags) + 1)
        self.row_before = nn.Embedding(spec.height, d_model)
        self.column_before = nn.Embedding(spec.width, d_model)
        self.kept = nn.Embedding(2, d_model)
        for embedding in (self.row_before, self.column_before, self.kept):
            nn.init.normal_(embedding.weight, std=d_model**-0.5)

    def forward(
        self, canvas: Canvas, step: Int64[Tensor, " n"]
    ) -> tuple[Float[Tensor, "b n e"], Float[Tensor, "b n n_numbers"]]:
        raster, spec = self.raster, self.raster.spec
        place, before = canvas.places(step), canvas.places((step - 1).clamp(min=0))
        # Places outside of the image are not looked at.
        inside = cast(Tensor, self.inside)[place]
        around = torch.where(inside, place.unsqueeze(-1) + cast(Tensor, self.shifts), 0)
        earlier = inside & (canvas.ranks(around) < step.unsqueeze(-1))
        started = (step > 0).unsqueeze(-1)
        known = torch.cat([earlier, started.expand(place.shape[0], -1, -1)], dim=-1)
        level = canvas.at(torch.cat([around, before.unsqueeze(-1)], dim=-1))
        x, numbers = self.embedded(level, known, place)
        came = self.row_before(before // raster.row_length) + self.column_before(
            before // raster.steps_per_pixel % spec.width
        )
        kept = self.kept((step < canvas.kept.unsqueeze(-1)).long())
        return x + torch.where(started, came, 0) + kept, numbers


def _on_all_sides(neighbours: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The offsets in all eight directions, from near to far."""
    found = {
        offset
        for a, b in neighbours
        for row, column in ((a, b), (b, a))
        for offset in ((row, column), (row, -column), (-row, column), (-row, -column))
    }
    return sorted(found, key=lambda offset: (offset[0] ** 2 + offset[1] ** 2, offset))


class KnownPrediction(LinearPrediction):
    """A linear prediction for each pattern of known pixels among the four adjacent ones.

    One linear function cannot serve a pixel between two known ones as well as a pixel with none
    below. At first the weights of the raster are taken where just the pixels to the left and above
    are known, and the mean of the known ones in every other pattern.

    Attributes:
        weight: "k*s f"; bit i of the pattern is `ADJACENT[i]`.
    """

    def __init__(self, embedding: KnownNeighbourhood) -> None:
        super().__init__(embedding)
        self.adjacent = embedding.adjacent
        self.values = values = embedding.raster.values_per_step
        first = self.weight.detach()
        patterns = torch.zeros(1 << len(ADJACENT), *first.shape)
        for pattern in range(1, len(patterns)):
            known = [k for i, k in enumerate(self.adjacent) if pattern >> i & 1 and k >= 0]
            for k in known:
                own = patterns[pattern, :, k * values : (k + 1) * values]
                own.fill_diagonal_(1 / len(known))
        patterns[0b0011] = first
        self.weight = nn.Parameter(patterns.flatten(0, 1))
        self.flags = embedding.n_numbers - embedding.n_numbers // (values + 1)

    def forward(self, numbers: Float[Tensor, "b n f"]) -> Float[Tensor, "b n s"]:
        every = super().forward(numbers).unflatten(-1, (-1, self.values))
        pattern = torch.zeros(numbers.shape[:2], dtype=torch.int64, device=numbers.device)
        for bit, k in enumerate(self.adjacent):
            if k >= 0:
                pattern = pattern + (numbers[..., self.flags + k] > 0).long() * (1 << bit)
        index = pattern[..., None, None].expand(-1, -1, 1, self.values)
        return every.gather(2, index).squeeze(2)


def build_embedding(
    config: Mapping[str, Any], d_model: int, raster: Raster, order: str
) -> InputEmbedding[Any]:
    """What a configuration describes; for any order, the neighbours are seen on all sides.

    Raises:
        UserError: for another order, or an embedding that has no use for it.
    """
    if order not in ORDERS:
        raise UserError(f"model.order={order} is unknown; choose one of {', '.join(ORDERS)}.")
    if order == "any":
        found = resolve_target(config.get("_target_"), InputEmbedding)
        if not issubclass(found, Neighbourhood):
            raise UserError(
                "model.order=any needs an embedding that sees neighbours, but model.embedding is "
                f"{found.__name__}; choose model=default or model=wide."
            )
        name = f"{KnownNeighbourhood.__module__}.{KnownNeighbourhood.__name__}"
        config = {**config, "_target_": name}
    return build(config, InputEmbedding, d_model=d_model, raster=raster)
