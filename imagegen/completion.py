"""Complete images from their first rows: which images, how many rows, and what is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from imagegen import options as opt
from imagegen.data.convert import SUFFIXES, fit_image, read_image
from imagegen.errors import UserError
from imagegen.images import (
    encode_png,
    from_display,
    grid_limit,
    make_completion_grid,
    save_png,
    to_display,
)
from imagegen.progress import image_progress
from imagegen.sample_options import SampleOptions

if TYPE_CHECKING:
    from imagegen.checkpoint import LoadedCheckpoint
    from imagegen.model import ImageTransformer
    from imagegen.spec import ImageSpec

DEFAULT_IMAGES = 8


@dataclass(frozen=True)
class Partial:
    """Images to complete.

    Attributes:
        images: levels.
        sources: where each comes from: a file, or a place in a data set.
        visible_rows: how many rows of each are kept, 0 to h - 1.
    """

    images: UInt8[np.ndarray, "n h w c"]
    sources: list[str]
    visible_rows: list[int]


def read_partial(loaded: LoadedCheckpoint, options: SampleOptions) -> Partial:
    """Gather the images that `options` name, or the first of the data set's test split.

    Raises:
        UserError: where images are missing, broken or of another size than the model draws, or
        the visible rows do not fit them.
    """
    spec = loaded.model.spec
    if options.images is None:
        images, sources = _from_test_split(loaded, options)
    else:
        out = options.out.resolve()
        images, sources = read_files(options.images, options.n, options.resize, spec, outside=out)
    return Partial(images, sources, rows_to_keep(options, len(images), spec.height))


def rows_to_keep(options: SampleOptions, n: int, height: int) -> list[int]:
    """The number of visible rows of each of `n` images.

    A share is rounded to the nearest number of rows that leaves one to draw.

    Raises:
        UserError: for a list of another length, or rows that leave nothing to draw.
    """
    name = "visible" if options.visible_rows is None else "visible_rows"
    given = options.visible if options.visible_rows is None else options.visible_rows
    values = given if isinstance(given, tuple) else (given,) * n
    if len(values) != n:
        raise UserError(
            f"{name} is a list of {len(values)}, but there are {n} images; "
            "give one value for each image, or one for all."
        )
    if options.visible_rows is None:
        return [min(int(share * height + 0.5), height - 1) for share in values]
    for rows in values:
        opt.whole_number(rows, "visible_rows", 0, height - 1)
    return [int(rows) for rows in values]


def draw_completions(
    model: ImageTransformer,
    options: SampleOptions,
    labels: Sequence[int] | None,
    partial: Partial,
    folder: Path,
) -> dict[str, Any]:
    """Draw all completions, then write each into `folder` beside its original, and a grid.

    Returns:
        the entries of the manifest that say what was done.
    """
    from imagegen.generate import DEFAULT_BATCH, complete

    n, k = len(partial.images), options.completions
    with image_progress("completing", n * k) as advance:
        started = perf_counter()
        completed = complete(
            model,
            partial.images,
            partial.visible_rows,
            k,
            seed=options.seed,
            controls=options.controls,
            labels=labels,
            batch_size=options.batch_size,
            progress=advance,
        )
        seconds = perf_counter() - started
    levels = model.spec.levels
    entries = []
    for i, (original, drawn) in enumerate(zip(partial.images, completed, strict=True)):
        names = [f"images/{i:05d}-original.png", *(f"images/{i:05d}-{j + 1}.png" for j in range(k))]
        for name, image in zip(names, [original, *drawn], strict=True):
            (folder / name).write_bytes(encode_png(to_display(image, levels)))
        entries.append(
            {
                "source": partial.sources[i],
                "visible_rows": partial.visible_rows[i],
                "original": names[0],
                "completions": names[1:],
            }
        )
    rows, columns = _grid_size(n, k, model.spec)
    grid = make_completion_grid(
        to_display(partial.images[:rows], levels),
        to_display(completed[:rows, :columns], levels),
        partial.visible_rows[:rows],
    )
    save_png(folder / "grid.png", grid)
    return {
        "n": n,
        "completions": k,
        "batch_size": options.batch_size or DEFAULT_BATCH,
        "seconds": seconds,
        "images_per_second": n * k / seconds,
        "grid": {"images": rows, "completions": columns},
        "images": entries,
    }


def _grid_size(n: int, k: int, spec: ImageSpec) -> tuple[int, int]:
    """Images and completions of each that the grid shows."""
    limit = grid_limit(spec.height, spec.width)
    columns = max(1, min(k, limit // 4))
    return max(1, min(n, limit // (columns + 2))), columns


def _from_test_split(
    loaded: LoadedCheckpoint, options: SampleOptions
) -> tuple[UInt8[np.ndarray, "n h w c"], list[str]]:
    dataset = opt.dataset_of(loaded.metadata, options.dataset, loaded.model.spec)
    split = dataset.split("test")
    n = options.n or _listed(options) or min(DEFAULT_IMAGES, len(split.images))
    if n > len(split.images):
        raise UserError(
            f"n={n}, but the test split of {dataset.name} holds {len(split.images)} images."
        )
    return np.array(split.images[:n]), [f"{dataset.name}/test/{i}" for i in range(n)]


def _listed(options: SampleOptions) -> int | None:
    """Length of the list of visible parts, if there is one."""
    given = options.visible if options.visible_rows is None else options.visible_rows
    return len(given) if isinstance(given, tuple) else None


def read_files(
    paths: Sequence[Path],
    n: int | None,
    resize: bool,
    spec: ImageSpec,
    outside: Path | None = None,
) -> tuple[UInt8[np.ndarray, "n h w c"], list[str]]:
    """The first `n` images of the files and folders named, as levels, and where each lies.

    Args:
        paths: image files, and folders of them, nested or not.
        n: number of images; None takes all.
        resize: whether images of another size than `spec` are resized and cropped, or refused.
        spec: what the images are to be.
        outside: a folder that no image may lie in, for it will be replaced.

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
                f"{file} lies in out={outside}, which would be replaced; choose another out."
            )
    images = np.stack([_read(file, resize, spec) for file in files])
    return from_display(images, spec.levels), [str(file) for file in files]


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
            inside = _walk(path)
            if not inside:
                raise UserError(
                    f"images={path} holds no images ({', '.join(sorted(SUFFIXES))}); "
                    "name a folder that does."
                )
            files += inside
        else:
            raise UserError(f"images={path} does not exist; name an image file or a folder.")
    return files


def _walk(root: Path) -> list[Path]:
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
