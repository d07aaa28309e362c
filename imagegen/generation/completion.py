"""Complete partial images: which images, what of them is kept, and what is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, UInt8

from imagegen.core.errors import UserError
from imagegen.core.words import counted
from imagegen.data.convert import read_image
from imagegen.data.image_files import read_images
from imagegen.data.masks import Masks, read_visible
from imagegen.data.regions import Region, describe
from imagegen.generation.images import from_display, grid_limit, make_completion_grid, to_display
from imagegen.generation.job_folder import JobFolder
from imagegen.generation.sample_options import SampleOptions

if TYPE_CHECKING:
    from imagegen.checkpoint.reading import LoadedCheckpoint
    from imagegen.core.spec import ImageSpec
    from imagegen.generation.particles import Report
    from imagegen.generation.sampling_request import SamplingRequest
    from imagegen.model.transformer import ImageTransformer
else:  # Annotations are checked in tests; these are imported late.
    SamplingRequest = LoadedCheckpoint = ImageTransformer = ImageSpec = Report = Any

DEFAULT_IMAGES = 8
DEFAULT_REGION = Region("top", (0.5,), "0.5")


@dataclass(frozen=True)
class Partial:
    """Images to complete.

    Attributes:
        images: levels.
        sources: where each comes from: a file, or a place in a data set.
        visible: the pixels that are kept.
        said: what the manifest says of that, for each image.
    """

    images: UInt8[np.ndarray, "n h w c"]
    sources: list[str]
    visible: Bool[np.ndarray, "n h w"]
    said: list[dict[str, Any]]


def read_partial(loaded: LoadedCheckpoint, options: SampleOptions) -> Partial:
    """Gather the images that `options` name, or the first of the data set's test split.

    Raises:
        UserError: where images or masks are missing, broken or of another size than the model
        draws, or what is visible does not fit them.
    """
    spec = loaded.model.spec
    masks = None if options.mask is None else Masks(options.mask)
    if options.images is None:
        images, sources = _from_test_split(loaded, options)
    else:
        out = options.out.resolve()
        pixels, sources = read_images(options.images, options.n, options.resize, spec, outside=out)
        images = from_display(pixels, spec.levels)
    regions = regions_of(options, len(images))
    masked: list[np.ndarray | None] = [None] * len(images)
    if options.visible is None and (masks is not None or options.images is not None):
        masked = list(read_visible(sources, masks, spec))
    visible, said = [], []
    for i, (region, mask) in enumerate(zip(regions, masked, strict=True)):
        kept = region.visible(spec.height, spec.width, options.seed, i) if mask is None else mask
        visible.append(kept)
        said.append(_said(kept, region, mask is not None, masks, sources[i]))
    return Partial(images, sources, np.stack(visible), said)


def regions_of(options: SampleOptions, n: int) -> Sequence[Region]:
    """What is typed to be visible of each of `n` images, if it were not for masks.

    Raises:
        UserError: for a list of another length.
    """
    given = options.visible or DEFAULT_REGION
    if isinstance(given, Region):
        return [given] * n
    if len(given) != n:
        name = "visible_rows" if given[0].kind == "rows" else "visible"
        raise UserError(
            f"{name} is a list of {len(given)}, but there are {n} images; "
            "give one value for each image, or one for all."
        )
    return given


def _said(
    kept: Bool[np.ndarray, "h w"], region: Region, masked: bool, masks: Masks | None, source: str
) -> dict[str, Any]:
    """What the manifest says of the part of an image that is kept."""
    if masked:
        mask = "transparent pixels" if masks is None else str(masks.of(Path(source)))
        return {"mask": mask, **describe(kept)}
    if region.in_rows:
        return {"visible_rows": int(kept[:, 0].sum())}
    return {"visible": region.typed, **describe(kept)}


class Completions:
    """The work of `task=complete`; see `imagegen.generation.job.Work`."""

    verb = "completing"

    def __init__(
        self,
        model: ImageTransformer,
        options: SampleOptions,
        request: SamplingRequest,
        partial: Partial,
    ) -> None:
        from imagegen.generation.turned import orientations_for, particles_for

        self.model = model
        self.options = options
        self.request = request
        self.partial = partial
        self.n = len(partial.images)
        count = particles_for(model, partial.visible, options.particles)
        self.particles = {} if count is None else {"particles": count}
        self.orientation = orientations_for(model, partial.visible)
        self.reports: dict[int, Report] = {}

    def entries(self) -> dict[str, Any]:
        """What the manifest says of the images."""
        from imagegen.model.orientations import WORDS

        k = self.options.completions
        images = [
            {
                "source": source,
                **said,
                **({"orientation": WORDS[orientation]} if orientation else {}),
                "original": f"images/{_original(i)}",
                "completions": [f"images/{_completion(i, j)}" for j in range(k)],
            }
            for i, (source, said, orientation) in enumerate(
                zip(self.partial.sources, self.partial.said, self.orientation, strict=True)
            )
        ]
        return {"completions": k, **self.particles, "images": images}

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
            self.partial.visible,
            chosen,
            request=replace(self.request, progress=progress),
            batch_size=self.options.batch_size,
            report=self.reports.__setitem__,
            **self.particles,
        ):
            yield pairs, to_display(levels, self.model.spec.levels)

    def found(self) -> dict[str, Any]:
        """What became of the particles of the images that have been drawn, for the manifest."""
        reports = {f"{image:05d}": asdict(report) for image, report in self.reports.items()}
        return {"particles_by_image": reports} if reports else {}

    def remarks(self) -> list[str]:
        """A sentence where there were too few particles."""
        return collapse(self.reports)

    def grid(self, folder: Path) -> tuple[UInt8[np.ndarray, "H W c"], dict[str, int]]:
        """The grid of the files in `folder`, and how many images and completions it shows."""
        spec = self.model.spec
        rows, columns = _grid_size(self.n, self.options.completions, spec)

        def read(name: str) -> np.ndarray:
            return read_image(folder / name, spec.channels)

        grid = make_completion_grid(
            np.stack([read(_original(i)) for i in range(rows)]),
            np.stack([[read(_completion(i, j)) for j in range(columns)] for i in range(rows)]),
            self.partial.visible[:rows],
        )
        return grid, {"images": rows, "completions": columns}

    def said(self, drawn: int, images: int) -> str:
        """What has been drawn, in words."""
        return f"{counted(drawn, 'completion')} of {counted(images, 'image')}"


def collapse(reports: Mapping[int, Report], advice: str | None = None) -> list[str]:
    """A sentence on the images that too few particles have decided about, if there are any.

    Args:
        advice: what to do; by default that of a command that takes `particles=`.
    """
    collapsed = {image: report for image, report in reports.items() if report.collapsed}
    if not collapsed:
        return []
    worst = min(collapsed, key=lambda image: collapsed[image].left)
    report, were = collapsed[worst], "was" if len(collapsed) == 1 else "were"
    more = f"use more (particles={4 * report.particles}), or a model trained with model.order=any"
    return [
        f"{len(collapsed)} of {counted(len(reports), 'image')} {were} left with few particles, "
        f"image {worst} with {report.left} of {report.particles}: {advice or more}"
    ]


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
    return len(options.visible) if isinstance(options.visible, tuple) else None
