"""Masks that a user names: image files that say which pixels of other images are kept.

Axes: `h` row, `w` column.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.convert import fit_image, read_alpha, read_image
from imagegen.data.image_files import files_below

HOW = "white (or opaque) pixels are kept, black (or transparent) ones are drawn"


class Masks:
    """One mask for all images, or a folder with one for each, found by the name of the image.

    Args:
        path: of the file or the folder.

    Raises:
        UserError: where there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: list[Path] | None = None
        if path.is_dir():
            self.files = files_below(path)
            if not self.files:
                raise UserError(f"mask={path} holds no images; name a folder that does, or a file.")
        elif not path.is_file():
            raise UserError(f"mask={path} does not exist; name an image file or a folder of them.")

    def of(self, image: Path) -> Path:
        """The mask of an image: the file of its name, whatever the ending, in the nearest folder.

        Raises:
            UserError: where there is none, or more than one.
        """
        if self.files is None:
            return self.path
        found = [file for file in self.files if file.stem == image.stem]
        depths = [_common(file.parent.parts, image.parent.parts) for file in found]
        found = [file for file, depth in zip(found, depths, strict=True) if depth == max(depths)]
        if not found:
            raise UserError(
                f"mask={self.path} holds no mask for image {image}; add one named "
                f"{image.stem}.png, or name one file for all images."
            )
        if len(found) > 1:
            raise UserError(
                f"mask={self.path} holds {found[0].relative_to(self.path)} and "
                f"{found[1].relative_to(self.path)} for image {image}; leave one of them there."
            )
        return found[0]


def read_visible(
    sources: Sequence[str], masks: Masks | None, spec: ImageSpec
) -> list[Bool[np.ndarray, "h w"] | None]:
    """The pixels to keep of each of the image files that `read_images` has accepted.

    Args:
        sources: the files, or the names of images of a data set, which have the size of `spec`.
        masks: what says it; without them, the transparent pixels of an image are drawn.
        spec: the size that images, and masks with them, are resized to.

    Returns:
        None for an image without transparent pixels, where there are no masks.

    Raises:
        UserError: for masks that are missing, broken, of another size than the image's, or that
        keep all or nothing.
    """
    found: list[Bool[np.ndarray, "h w"] | None] = []
    for source in sources:
        path = Path(source)
        if masks is None:
            visible = read_opaque(path) if path.is_file() else None
            name = f"transparency of image {source}"
        else:
            shape = read_image(path, 1).shape[:2] if path.is_file() else spec.shape[:2]
            mask = masks.of(path)
            visible, name = read_mask(mask, source, *shape), f"mask {mask}"
        fitted = None if visible is None else fit_mask(visible, spec.height, spec.width, name)
        found.append(fitted)
    return found


def read_mask(path: Path, image: str, height: int, width: int) -> Bool[np.ndarray, "h w"]:
    """The pixels that a mask file keeps of an image.

    Where some pixels are transparent, these are drawn and the others kept, whatever their colours.
    Otherwise the lighter half of the levels is kept; levels 0 and 1 count as black and white.

    Args:
        image: what the mask is for, as a message names it.
        height, width: of that image.

    Raises:
        UserError: for a file that cannot be read, or has another size.
    """
    try:
        alpha = read_alpha(path)
        if alpha is not None and alpha.min() < 128:
            kept = alpha >= 128
        else:
            grey = read_image(path, 1)[..., 0]
            kept = grey > (127 if grey.max() > 1 else 0)
    except UserError as error:
        raise UserError(str(error).replace("image", "mask", 1)) from error
    if kept.shape != (height, width):
        raise UserError(
            f"mask {path} is {kept.shape[0]}x{kept.shape[1]} pixels (height x width), but image "
            f"{image} is {height}x{width}; give a mask of the image's size."
        )
    return kept


def read_opaque(path: Path) -> Bool[np.ndarray, "h w"] | None:
    """The opaque pixels of an image whose other pixels are to be drawn; None where all are opaque.

    A pixel that is partly transparent is drawn: its colour is not known for certain.
    """
    alpha = read_alpha(path)
    return None if alpha is None or alpha.min() == 255 else alpha == 255


def fit_mask(
    visible: Bool[np.ndarray, "h w"], height: int, width: int, name: str
) -> Bool[np.ndarray, "height width"]:
    """A mask resized and cropped as `fit_image` does with its image.

    Args:
        name: of what it comes from, in a message.

    Raises:
        UserError: where it keeps all or nothing.
    """
    shades = visible[..., None].astype(np.uint8)
    fitted = fit_image(shades, height, width, nearest=True)[..., 0] > 0
    if fitted.all() or not fitted.any():
        what = "all" if fitted.all() else "nothing"
        raise UserError(f"{name} keeps {what} of the image; {HOW}.")
    return fitted


def _common(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    """How many folders two paths have in common at their ends."""
    count = 0
    for a, b in zip(reversed(first), reversed(second), strict=False):
        if a != b:
            break
        count += 1
    return count
