"""The values of images known so far, where any of them may come first.

Axes: `b` batch, `h w` height, width, `n` position or place, `m` some positions,
`s` values per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from imagegen.attention.base import AttentionState
from imagegen.model.embeddings import Raster


@dataclass
class Canvas(AttentionState):
    """Values in the order of the raster, and when each of them is taken.

    A step is a position in the sequence, its place is the step of the raster that is taken then. A
    value is known to a step where its own step, its rank, comes before; so no flags are kept.
    Differences to the order of the raster are kept instead of places and ranks: a state then
    begins as zeros, as programs without PyTorch can make it (see `imagegen.checkpoint.onnx`).

    Attributes:
        levels: by place.
        place_shift: place minus step, by step.
        rank_shift: step minus place, by place.
        kept: number of steps that come first because their pixels are visible.
    """

    levels: UInt8[Tensor, "b n s"]
    place_shift: Int64[Tensor, "b n"]
    rank_shift: Int64[Tensor, "b n"]
    kept: Int64[Tensor, " b"]

    @classmethod
    def empty(
        cls,
        raster: Raster,
        batch_size: int,
        visible: Bool[Tensor, "b h w"] | None,
        device: torch.device,
    ) -> Canvas:
        """Without any value, for images of which these pixels come first; none by default."""
        length = raster.length
        levels = torch.zeros(
            batch_size, length, raster.values_per_step, dtype=torch.uint8, device=device
        )
        if visible is None:
            shift = torch.zeros(batch_size, length, dtype=torch.int64, device=device)
            return cls(levels, shift, shift.clone(), shift.new_zeros(batch_size))
        steps = torch.arange(length, device=device)
        places, ranks = raster.places(visible), raster.ranks(visible)
        return cls(levels, places - steps, ranks - steps, raster.kept_steps(visible))

    def places(self, step: Int64[Tensor, " m"]) -> Int64[Tensor, "b m"]:
        """The places of steps."""
        return self.place_shift[:, step] + step

    def ranks(self, place: Int64[Tensor, "b ..."]) -> Int64[Tensor, "b ..."]:
        """The steps at places."""
        return self._at(self.rank_shift, place) + place

    def at(self, place: Int64[Tensor, "b ..."]) -> UInt8[Tensor, "b ... s"]:
        """The values at places."""
        return self._at(self.levels, place)

    def first(self, count: int) -> UInt8[Tensor, "b count s"]:
        """The values of the first steps."""
        return self.at(self.places(torch.arange(count, device=self.levels.device)))

    def taken(self, values: UInt8[Tensor, "b m s"], step: Int64[Tensor, " m"]) -> Canvas:
        """With the values of steps; in the same memory where no gradient is needed."""
        place = self.places(step).unsqueeze(-1).expand_as(values)
        write = torch.scatter if torch.is_grad_enabled() else Tensor.scatter_
        return Canvas(
            write(self.levels, 1, place, values), self.place_shift, self.rank_shift, self.kept
        )

    def _at(self, table: Tensor, place: Tensor) -> Tensor:
        row = torch.arange(place.shape[0], device=place.device)
        return table[row.view(-1, *(1,) * (place.dim() - 1)), place]
