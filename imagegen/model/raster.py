"""The order of the values of an image.

Axes: `b` batch, `h w c` height, width, channel, `n` position, `s` values per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Int64, Integer, UInt8
from torch import Tensor

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
        images = rearrange(
            sequence, "b (h w p) s -> b h w (p s)", w=self.spec.width, p=self.steps_per_pixel
        )
        return images.byte()


def _gathered(sequence: Tensor, steps: Tensor) -> Tensor:
    """sequence[b, steps[b, n]], "b n s"."""
    return sequence.gather(1, steps.unsqueeze(-1).expand_as(sequence))
