"""Images to sequences and back: row by row, a pixel or a sub-pixel a step.

Axes: `b` batch, `h w c` height, width, channel, `n` position in the sequence, `s` values a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from einops import rearrange
from jaxtyping import Integer, UInt8
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

    def to_sequence(self, images: UInt8[Tensor, "b h w c"]) -> UInt8[Tensor, "b n s"]:
        """Levels of images, in the order of the steps. Takes the first rows of an image as well."""
        return rearrange(images, "b h w (p s) -> b (h w p) s", s=self.values_per_step)

    def to_images(self, sequence: Integer[Tensor, "b n s"]) -> UInt8[Tensor, "b h w c"]:
        """The inverse of `to_sequence`."""
        images = rearrange(
            sequence, "b (h w p) s -> b h w (p s)", w=self.spec.width, p=self.steps_per_pixel
        )
        return images.byte()
