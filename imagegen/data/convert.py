"""Turn image files into arrays of levels 0 to 255, and fit them to a size.

What each kind of file becomes:

- Camera orientation (EXIF) is applied; colour profiles and gamma notes are not.
- Transparency (an alpha channel, or a transparent colour of a palette or an 8-bit image) is laid
  over white.
- Palettes become the colours that they index; 1-bit images become 0 and 255.
- 16 bits per channel lose the lower eight, grey and colour alike. Other whole numbers and
  floating-point values have no known range and are refused.
- CMYK and YCbCr become RGB by the plain formulas.
- Of an animation or a file of several pages the first image counts.
- Colour becomes grey by luma (ITU-R 601), and grey becomes three equal channels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from imagegen.core.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 1 << 27  # a file that claims more is a mistake or an attack; 384 MiB as RGB
FIRST_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"))
"""What was read when images were split by position; see `imagegen.data.folder_listing`."""
# Pillow reads AVIF since 11.3, unless it was built without.
_AVIF = (".avif",) if find_spec("PIL._avif") else ()
SUFFIXES = FIRST_SUFFIXES.union((".jfif", ".jpe"), _AVIF)
"""Of the files that are read as images."""

_MODES = {1: "L", 3: "RGB"}
_SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N")
_PLAIN = ("1", "L", "P", "RGB", "RGBA", "RGBX", "LA", "La", "PA", "RGBa", "CMYK", "YCbCr")


def read_image(path: Path, channels: int) -> UInt8[np.ndarray, "h w c"]:
    """Read an image file as grey (`channels` 1) or RGB (3), levels 0 to 255.

    Raises:
        UserError: where the file is missing, broken, not an image, larger than 134 megapixels, or
            of a kind that has no clear meaning as 8-bit grey or RGB; or `channels` is neither 1
            nor 3.
    """
    check_channels(channels)

    def converted(image: Image.Image, file_format: str | None) -> np.ndarray:
        plain = _eight_bit(image, file_format, path)
        return np.array(plain.convert(_MODES[channels]), dtype=np.uint8)

    array: np.ndarray = _opened(path, converted)
    return array[..., None] if array.ndim == 2 else array


def read_alpha(path: Path) -> UInt8[np.ndarray, "h w"] | None:
    """How opaque each pixel of an image file is, 0 to 255; None where it has no transparency.

    Raises:
        UserError: as `read_image`.
    """

    def alpha(image: Image.Image, file_format: str | None) -> np.ndarray | None:
        if image.mode not in _PLAIN or not image.has_transparency_data:
            return None
        return np.array(image.convert("RGBA").getchannel("A"), dtype=np.uint8)

    found: np.ndarray | None = _opened(path, alpha)
    return found


def _opened(path: Path, read: Callable[[Image.Image, str | None], Any]) -> Any:
    """What `read` makes of an image file, given the image, turned upright, and its format.

    Raises:
        UserError: see `read_image`.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    _quiet_size_warning()
    try:
        # Not by its name: Pillow (13.0) maps the pixels of such a TIFF file into memory as if they
        # had been turned already.
        with path.open("rb") as file, Image.open(file) as image:
            if image.width * image.height > MAX_PIXELS:
                raise UserError(
                    f"{path} is too large: {image.width}x{image.height} pixels, but at most "
                    f"{MAX_PIXELS} are read; make it smaller or remove it."
                )
            image.load()
            return read(ImageOps.exif_transpose(image), image.format)
    except UserError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{path} is too large: {error}") from error
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give an image file.") from error
    # Pillow's decoders answer broken files with almost any exception.
    except Exception as error:
        reason = "it is not an image" if isinstance(error, UnidentifiedImageError) else error
        raise UserError(f"image {path} cannot be read ({reason}); replace or remove it.") from error


def fit_image(
    image: UInt8[np.ndarray, "h w c"], height: int, width: int, nearest: bool = False
) -> UInt8[np.ndarray, "height width c"]:
    """Resize an image until it just covers the target, and crop the centre.

    Resizing is bicubic, with a filter as wide as the reduction (antialiased), or takes the
    `nearest` pixel. An image that already has the size comes back unchanged.
    """
    from PIL import Image, ImageOps

    if image.shape[:2] == (height, width):
        return image
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    how = Image.Resampling.NEAREST if nearest else Image.Resampling.BICUBIC
    fitted = np.array(ImageOps.fit(picture, (width, height), how))
    return fitted[..., None] if fitted.ndim == 2 else fitted


def check_channels(channels: object) -> None:
    """Refuse anything but 1 and 3.

    Raises:
        UserError: for another number of channels.
    """
    if isinstance(channels, bool) or channels not in _MODES:
        raise UserError(f"channels={channels}, but it must be 1 (grey) or 3 (RGB).")


def _eight_bit(image: Image.Image, file_format: str | None, path: Path) -> Image.Image:
    """The image as L, RGB or a mode that converts to both without loss of meaning."""
    from PIL import Image

    # Pillow opens 16-bit PGM files, and PNG files in older versions, with 32 bits per pixel.
    if image.mode in _SIXTEEN_BIT or (image.mode == "I" and file_format in ("PPM", "PNG")):
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    if image.mode not in _PLAIN:
        raise UserError(
            f"image {path} has pixels of mode {image.mode}, which have no clear meaning as 8-bit "
            "grey or RGB; convert it to an 8-bit or 16-bit PNG."
        )
    if image.has_transparency_data:
        colour = image.convert("RGBA")
        white = Image.new("RGBA", colour.size, "white")
        return Image.alpha_composite(white, colour).convert("RGB")
    if image.mode == "P":
        return image.convert("RGB")
    return image


def _quiet_size_warning() -> None:
    """Silence Pillow's warning about large files: they are refused in words of our own."""
    from PIL import Image

    # catch_warnings would not do: images are read in several threads.
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
