"""Images as people look at them: levels stretched to 0-255, PNG files, and grids.

Axes: `n` image, `k` completion, `h` row, `w` column, `c` channel.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image, ImageDraw, ImageFont
from PIL.ImageFont import FreeTypeFont

from imagegen.core.errors import UserError
from imagegen.core.files import write_atomic
from imagegen.data.regions import as_visible

PADDING_VALUE = 208
"""Colour between the tiles of a grid, and of its empty places."""

HIDDEN_VALUE = 128
"""Colour of the part of an image that a completion has to draw."""

CAPTION_HEIGHT = 16
"""Pixels of a line of text above a grid."""

GRID_TILES = 256
GRID_PIXELS = 1 << 24

_PNG_CHANNELS = (1, 3)


def to_display(levels_array: UInt8[np.ndarray, "*s"], levels: int) -> UInt8[np.ndarray, "*s"]:
    """Stretch levels 0..levels-1 linearly to 0..255, rounded; the identity for 256 levels.

    Raises:
        ValueError: for a value that is not a level.
    """
    if levels_array.size and int(levels_array.max()) >= levels:
        raise ValueError(f"level {levels_array.max()} is outside 0 to {levels - 1}")
    scale = np.zeros(256, dtype=np.uint8)
    scale[:levels] = (np.arange(levels) * 255 * 2 + levels - 1) // (2 * (levels - 1))
    return scale[levels_array]


def from_display(array: UInt8[np.ndarray, "*s"], levels: int) -> UInt8[np.ndarray, "*s"]:
    """Map 0..255 to the nearest level 0..levels-1: the inverse of `to_display` on its values."""
    nearest = (np.arange(256) * (levels - 1) * 2 + 255) // (2 * 255)
    return nearest.astype(np.uint8)[array]


def encode_png(image: UInt8[np.ndarray, "h w c"]) -> bytes:
    """The bytes of a PNG file that holds exactly these values: 1 channel is grey, 3 are RGB.

    Raises:
        UserError: for another number of channels.
    """
    channels = image.shape[2]
    if channels not in _PNG_CHANNELS:
        raise UserError(
            f"images of {channels} channels cannot be written as PNG; only 1 (grey) or 3 (RGB) can."
        )
    pixels = np.ascontiguousarray(image[:, :, 0] if channels == 1 else image)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def save_png(path: Path, image: UInt8[np.ndarray, "h w c"]) -> None:
    """Write `image` (0..255) to `path` exactly, under a temporary name first.

    Raises:
        UserError: naming `path` where it cannot be written; for other than 1 or 3 channels.
    """
    write_atomic(path, encode_png(image))


def enlargement(height: int, width: int, min_side: int) -> int:
    """Whole factor that brings the shorter side to `min_side` or more, within 16 x on the longer.

    The longer side stops at 16 times `min_side`, so that a strip does not become a wall.
    """
    wanted = math.ceil(min_side / min(height, width))
    return max(1, min(wanted, 16 * min_side // max(height, width)))


def grid_limit(height: int, width: int) -> int:
    """Number of tiles that a grid may hold and still open in any viewer."""
    return max(1, min(GRID_TILES, GRID_PIXELS // (height * width)))


def square_columns(n: int, height: int, width: int) -> int:
    """Number of columns that makes a grid of `n` tiles about square."""
    return min(n, max(1, math.ceil(math.sqrt(n * height / width))))


def make_grid(
    images: UInt8[np.ndarray, "n h w c"],
    columns: int | None = None,
    padding: int = 2,
    min_side: int = 32,
) -> UInt8[np.ndarray, "H W c"]:
    """Lay images out row by row; each pixel becomes a block of equal pixels, nothing is blended.

    Args:
        images: values 0..255, at least one image.
        columns: images in a row; by default the grid is about square.
        padding: pixels between tiles and around them, of `PADDING_VALUE`.
        min_side: small images are enlarged by a whole number until their shorter side has this
            many pixels; 1 leaves them as they are.
    """
    n, height, width, channels = images.shape
    if n == 0:
        raise ValueError("a grid needs at least one image")
    factor = enlargement(height, width, min_side)
    columns = min(n, columns or square_columns(n, height, width))
    rows = math.ceil(n / columns)
    tile_height, tile_width = height * factor + padding, width * factor + padding
    grid = np.full(
        (rows * tile_height + padding, columns * tile_width + padding, channels),
        PADDING_VALUE,
        dtype=np.uint8,
    )
    for i, image in enumerate(images):
        top = (i // columns) * tile_height + padding
        left = (i % columns) * tile_width + padding
        tile = image.repeat(factor, axis=0).repeat(factor, axis=1)
        grid[top : top + height * factor, left : left + width * factor] = tile
    return grid


@cache
def caption_font() -> FreeTypeFont | ImageFont.ImageFont:
    """The font of captions, which takes longer to load than to use."""
    return ImageFont.load_default(CAPTION_HEIGHT - 4)


def caption_fits(caption: str, width: int | float) -> bool:
    """Whether a line of text can stand above a column of this width, in pixels."""
    return caption_font().getlength(caption) <= width - 2


def with_captions(
    grid: UInt8[np.ndarray, "H W c"], captions: Sequence[str]
) -> UInt8[np.ndarray, "H2 W c"]:
    """The grid below a strip of text that has one caption for each of its columns.

    Args:
        grid: values 0..255, of 1 or 3 channels.
        captions: for columns of equal width; those that are too long are cut off.
    """
    _, width, channels = grid.shape
    strip = Image.new("L", (width, CAPTION_HEIGHT), PADDING_VALUE)
    drawn = ImageDraw.Draw(strip)
    font = caption_font()
    column = width / len(captions)
    for index, caption in enumerate(captions):
        fits = next(
            (
                caption[:end]
                for end in range(len(caption), 0, -1)
                if caption_fits(caption[:end], column)
            ),
            "",
        )
        centre = ((index + 0.5) * column, CAPTION_HEIGHT / 2)
        drawn.text(centre, fits, fill=0, font=font, anchor="mm")
    text = np.repeat(np.asarray(strip)[..., None], channels, axis=2)
    return np.concatenate([text, grid])


def mask_hidden(
    images: UInt8[np.ndarray, "n h w c"], visible: Bool[np.ndarray, "n h w"]
) -> UInt8[np.ndarray, "n h w c"]:
    """A copy of the images (0..255) with all pixels covered that are not visible."""
    hidden = np.full_like(images, HIDDEN_VALUE)
    return np.where(visible[..., None], images, hidden)


def make_completion_grid(
    originals: UInt8[np.ndarray, "n h w c"],
    completions: UInt8[np.ndarray, "n k h w c"],
    visible: Bool[np.ndarray, "n h w"] | Sequence[int],
    padding: int = 2,
    min_side: int = 32,
) -> UInt8[np.ndarray, "H W c"]:
    """One row for each image: the original, its visible part, its completions (all 0..255).

    Args:
        visible: which pixels are, or for each image the number of its first rows.
    """
    masked = mask_hidden(originals, as_visible(visible, *originals.shape[:3]))
    rows = np.concatenate([originals[:, None], masked[:, None], completions], axis=1)
    tiles = rows.reshape(-1, *originals.shape[1:])
    return make_grid(tiles, columns=rows.shape[1], padding=padding, min_side=min_side)
