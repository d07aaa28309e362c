"""Complete images from their first rows: which images, how many rows, and what is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from imagegen.core import values as opt
from imagegen.core.errors import UserError
from imagegen.data.convert import read_image
from imagegen.data.image_files import read_images
from imagegen.generation.images import from_display, grid_limit, make_completion_grid, to_display
from imagegen.generation.job_folder import JobFolder
from imagegen.generation.options import SampleOptions

if TYPE_CHECKING:
    from imagegen.checkpoint.reading import LoadedCheckpoint
    from imagegen.core.spec import ImageSpec
    from imagegen.generation.sampling_loop import Drawing
    from imagegen.model.transformer import ImageTransformer
else:  # Annotations are checked in tests; these are imported late.
    Drawing = LoadedCheckpoint = ImageTransformer = ImageSpec = Any

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
        pixels, sources = read_images(options.images, options.n, options.resize, spec, outside=out)
        images = from_display(pixels, spec.levels)
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


class Completions:
    """The work of `task=complete`; see `imagegen.generation.job.Work`."""

    verb = "completing"

    def __init__(
        self,
        model: ImageTransformer,
        options: SampleOptions,
        drawing: Drawing,
        partial: Partial,
    ) -> None:
        self.model = model
        self.options = options
        self.drawing = drawing
        self.partial = partial
        self.n = len(partial.images)

    def entries(self) -> dict[str, Any]:
        """What the manifest says of the images."""
        k = self.options.completions
        images = [
            {
                "source": source,
                "visible_rows": rows,
                "original": f"images/{_original(i)}",
                "completions": [f"images/{_completion(i, j)}" for j in range(k)],
            }
            for i, (source, rows) in enumerate(
                zip(self.partial.sources, self.partial.visible_rows, strict=True)
            )
        ]
        return {"completions": k, "images": images}

    def files(self, images: range) -> dict[str, tuple[int, int]]:
        """The files to draw, and the image and the completion that each holds."""
        forks = range(self.options.completions)
        return {_completion(i, j): (i, j) for i in images for j in forks}

    def prepare(self, folder: JobFolder, images: range) -> None:
        """Write the originals; those that are there must be the same."""
        missing = set(folder.missing(map(_original, images)))
        for i in images:
            name, original = (
                _original(i),
                to_display(self.partial.images[i], self.model.spec.levels),
            )
            if name in missing:
                folder.write_image(name, original)
            elif (read_image(folder.path / "images" / name, original.shape[2]) != original).any():
                raise UserError(
                    f"{folder.path / 'images' / name} is not what {self.partial.sources[i]} holds "
                    "now; choose another out."
                )

    def draw(
        self, chosen: Sequence[tuple[int, int]], progress: Callable[[float], None]
    ) -> Iterator[tuple[Sequence[tuple[int, int]], UInt8[np.ndarray, "b h w c"]]]:
        """The completions chosen (0..255), as they are finished."""
        from imagegen.generation.sampling_loop import draw_completions

        for pairs, levels in draw_completions(
            self.model,
            self.partial.images,
            self.partial.visible_rows,
            chosen,
            drawing=replace(self.drawing, progress=progress),
            batch_size=self.options.batch_size,
        ):
            yield pairs, to_display(levels, self.model.spec.levels)

    def grid(self, folder: Path) -> tuple[UInt8[np.ndarray, "H W c"], dict[str, int]]:
        """The grid of the files in `folder`, and how many images and completions it shows."""
        spec = self.model.spec
        rows, columns = _grid_size(self.n, self.options.completions, spec)

        def read(name: str) -> np.ndarray:
            return read_image(folder / name, spec.channels)

        grid = make_completion_grid(
            np.stack([read(_original(i)) for i in range(rows)]),
            np.stack([[read(_completion(i, j)) for j in range(columns)] for i in range(rows)]),
            self.partial.visible_rows[:rows],
        )
        return grid, {"images": rows, "completions": columns}

    def said(self, drawn: int, images: int) -> str:
        """What has been drawn, in words."""
        return f"{drawn} completions of {images} images"


def _original(image: int) -> str:
    return f"{image:05d}-original.png"


def _completion(image: int, fork: int) -> str:
    return f"{image:05d}-{fork + 1}.png"


def _grid_size(n: int, k: int, spec: ImageSpec) -> tuple[int, int]:
    """Images and completions of each that the grid shows."""
    limit = grid_limit(spec.height, spec.width)
    columns = max(1, min(k, limit // 4))
    return max(1, min(n, limit // (columns + 2))), columns


def _from_test_split(
    loaded: LoadedCheckpoint, options: SampleOptions
) -> tuple[UInt8[np.ndarray, "n h w c"], list[str]]:
    from imagegen.checkpoint.training_data import dataset_of

    dataset = dataset_of(loaded.metadata, options.dataset, loaded.model.spec)
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
