"""What an image is: its size, its channels and its number of levels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from imagegen.core.errors import UserError

MAX_DIMS = 1 << 24


@dataclass(frozen=True)
class ImageSpec:
    """Shape and quantisation of the images that a data set holds and a model draws.

    Attributes:
        height, width: pixels.
        channels: 1 (grey) or more; 3 is RGB.
        levels: number of values that a dimension takes, 2 to 256; values are 0 to levels - 1.

    Raises:
        UserError: for sizes below one, more than 2^24 dimensions, or levels outside 2 to 256.
    """

    height: int
    width: int
    channels: int = 1
    levels: int = 256

    def __post_init__(self) -> None:
        for name in ("height", "width", "channels", "levels"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(
                    f"image {name} is {value!r}, but it must be a whole number of at least 1."
                )
        if not 2 <= self.levels <= 256:
            raise UserError(f"image levels is {self.levels}, but it must be between 2 and 256.")
        if self.dims > MAX_DIMS:
            raise UserError(
                f"images of {self.height}x{self.width}x{self.channels} have {self.dims} "
                f"dimensions, but at most {MAX_DIMS} are supported; choose a smaller size."
            )

    @property
    def dims(self) -> int:
        """Number of dimensions of one image, height * width * channels."""
        return self.height * self.width * self.channels

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        return (self.height, self.width, self.channels)

    def to_dict(self) -> dict[str, int]:
        """Plain numbers, as kept in a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ImageSpec:
        """The inverse of `to_dict`."""
        try:
            return cls(**values)
        except TypeError as error:
            raise UserError(
                f"an image spec must have height, width, channels and levels, not {dict(values)!r}."
            ) from error
