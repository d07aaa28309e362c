"""Images to sequences and back: row by row, and r g b r g b ... inside a row.

Axes: `b` batch, `h w c` height, width, channel, `n` position in the sequence, `s` values a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from einops import rearrange
from jaxtyping import Integer, UInt8
from torch import Tensor

from imagegen.spec import ImageSpec


@dataclass(frozen=True)
class Raster:
    """The order in which a model meets the values of an image: sub-pixels, one value a step."""

    spec: ImageSpec
    values_per_step: int = 1

    @property
    def length(self) -> int:
        """Number of steps `n` of an image."""
        return self.spec.dims // self.values_per_step

    @property
    def row_length(self) -> int:
        """Number of steps of one row of an image."""
        return self.length // self.spec.height

    def to_sequence(self, images: UInt8[Tensor, "b h w c"]) -> UInt8[Tensor, "b n s"]:
        """Levels of images, in the order of the steps. Takes the first rows of an image as well."""
        return rearrange(images, "b h w c -> b (h w c) 1")

    def to_images(self, sequence: Integer[Tensor, "b n s"]) -> UInt8[Tensor, "b h w c"]:
        """The inverse of `to_sequence`."""
        spec = self.spec
        images = rearrange(sequence, "b (h w c) 1 -> b h w c", w=spec.width, c=spec.channels)
        return images.byte()
