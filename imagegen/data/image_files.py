"""Image files that a user names, one by one or by their folder; not a data set.

Axes: `n` image, `h` row, `w` column, `c` channel.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.convert import SUFFIXES, fit_image, read_image


def read_images(
    paths: Sequence[Path],
    n: int | None,
    resize: bool,
    spec: ImageSpec,
    outside: Path | None = None,
) -> tuple[UInt8[np.ndarray, "n h w c"], list[str]]:
    """The first `n` images of the files and folders named, 0 to 255, and the file of each.

    Args:
        paths: image files, and folders of them, nested or not.
        n: number of images; None takes all.
        resize: whether images of another size than `spec` are resized and cropped, or refused.
        spec: the size and the channels that the model draws.
        outside: a folder that will be replaced, so that no image may be in it.

    Raises:
        UserError: where images are missing, broken, too few, or of another size.
    """
    files = _files_in(paths)
    if n is not None and n > len(files):
        raise UserError(f"n={n}, but images holds {len(files)} in all.")
    files = files[:n]
    for file in files:
        if outside is not None and file.resolve().is_relative_to(outside):
            raise UserError(
                f"{file} is inside out={outside}, which would be replaced; choose another out."
            )
    images = np.stack([_read(file, resize, spec) for file in files])
    return images, [str(file) for file in files]


def _files_in(paths: Sequence[Path]) -> list[Path]:
    """The files named, and the image files of the folders named, sorted and hidden ones left out.

    Raises:
        UserError: for a path that does not exist, or a folder without images.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            inside = files_below(path)
            if not inside:
                raise UserError(
                    f"images={path} holds no images ({', '.join(sorted(SUFFIXES))}); "
                    "name a folder that does."
                )
            files += inside
        else:
            raise UserError(f"images={path} does not exist; name an image file or a folder.")
    return files


def files_below(root: Path) -> list[Path]:
    """The image files of a folder and of those in it, sorted; hidden ones are left out.

    Raises:
        UserError: for a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}.") from error

    found = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith((".", "__MACOSX"))]
        found += [Path(folder) / name for name in names if not name.startswith(".")]
    # A pipe of that name would be waited for.
    return sorted(p for p in found if p.suffix.lower() in SUFFIXES and not p.is_fifo())


def _read(path: Path, resize: bool, spec: ImageSpec) -> UInt8[np.ndarray, "h w c"]:
    """One image, 0 to 255, of the model's size and channels."""
    image = read_image(path, spec.channels)
    height, width = image.shape[:2]
    if (height, width) == (spec.height, spec.width):
        return image
    if not resize:
        raise UserError(
            f"image {path} is {height}x{width} pixels (height x width), but the model draws "
            f"{spec.height}x{spec.width}; resize it, or add resize=true."
        )
    return fit_image(image, spec.height, spec.width)
