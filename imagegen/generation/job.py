"""The work behind `sample.py`: draw new images, or complete partial ones, into a folder.

The images are written as they are drawn, so that memory does not grow with their number, and a job
that was stopped can be continued; see `imagegen.generation.job_folder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from imagegen.checkpoint.provenance import load_source, versions
from imagegen.core import values as opt
from imagegen.core.machine import describe
from imagegen.core.progress import image_progress
from imagegen.data.convert import read_image
from imagegen.generation.completion import Completions, read_partial
from imagegen.generation.images import grid_limit, make_grid, to_display, with_captions
from imagegen.generation.job_folder import FINISHED, JobFolder, check_out, job_folder
from imagegen.generation.sample_options import SampleOptions, labels_of

if TYPE_CHECKING:
    import torch

    from imagegen.generation.sampling_request import SamplingRequest
    from imagegen.model.transformer import ImageTransformer
else:  # Annotations are checked in tests; these are imported late.
    SamplingRequest = ImageTransformer = torch = Any

DEFAULT_IMAGES = 64
MAX_COLUMNS = 32  # labels side by side in a grid


@runtime_checkable
class Work(Protocol):
    """What a task draws: `n` images (or completions of them), each into a file of its own."""

    verb: str
    n: int

    def entries(self) -> dict[str, Any]:
        """What the manifest says of the images."""
        ...

    def files(self, images: range) -> dict[str, Any]:
        """The names of the files to draw for these images, and a key for each."""
        ...

    def prepare(self, folder: JobFolder, images: range) -> None:
        """Write what belongs beside the drawn files of these images."""
        ...

    def draw(
        self, chosen: Sequence[Any], progress: Callable[[float], None]
    ) -> Iterator[tuple[Sequence[Any], UInt8[np.ndarray, "b h w c"]]]:
        """The images of these keys (0..255), a batch at a time, as they are finished."""
        ...

    def grid(self, folder: Path) -> tuple[UInt8[np.ndarray, "H W c"], dict[str, int]]:
        """A grid of the first files in `folder`, and how many it shows."""
        ...

    def said(self, drawn: int, images: int) -> str:
        """What has been drawn, in words."""
        ...

    def found(self) -> dict[str, Any]:
        """What the manifest says beside `entries` when images have been drawn."""
        ...

    def remarks(self) -> list[str]:
        """Sentences that a user should read then."""
        ...


def run(config: Mapping[str, Any]) -> Path:
    """Do what `conf/sample.yaml` and the command line ask; print where the result is.

    Returns:
        the folder written.

    Raises:
        UserError: for anything that cannot be; then nothing is written, or what has been drawn by
        then stays, to be continued.
    """
    options = SampleOptions.from_config(opt.plain(config))
    check_out(options.out)
    device = opt.resolve_device(options.device)
    source = load_source(options.ckpt, device)
    model = source.loaded.model
    names = source.loaded.metadata.get("class_names")
    labels = labels_of(options.label, names, model.n_classes)
    work: Work
    if options.task == "complete":
        partial = read_partial(source.loaded, options)
        request = _request(model, options, labels)
        work = Completions(model, options, request, partial)
    else:
        request = _request(model, options, labels)
        work = Samples(model, options, request, names)
    settings = {
        "task": options.task,
        **source.to_dict(),
        "seed": options.seed,
        **asdict(options.controls),
        "labels": labels,
        "n": work.n,
        "batch_size": _batch_size(options),
        **work.entries(),
        "image_shape": list(model.spec.shape),
        "levels": model.spec.levels,
        "device": device.type,
        "loop": request.loop,
        "machine": describe(device),
        **versions(),
    }
    shared = options.part is not None
    with job_folder(options.out, settings, options.resume, shared) as folder:
        _fill(work, folder, options, _how(request, device))
    return options.out


def _how(request: SamplingRequest, device: torch.device) -> str:
    """What draws, and why on this machine; why no faster loop does has been said before."""
    from imagegen.generation.decode import machine_choice

    if request.decoder is None:
        return f"drawing on {device} with PyTorch's operations"
    return f"drawing on {device}, {request.loop} ({machine_choice(device).reason})"


def _fill(work: Work, folder: JobFolder, options: SampleOptions, how: str) -> None:
    """Draw what is missing of this process' part; the process that ends last finishes the job."""
    images = _part(work.n, options.part)
    files = work.files(images)
    missing = folder.missing(files)
    if not missing and folder.state == FINISHED and (folder.path / "grid.png").exists():
        print(f"nothing is missing in {options.out}")
        return
    folder.begin()
    print(how, flush=True)
    work.prepare(folder, images)
    seconds = _draw(work, {files[name]: name for name in missing}, folder)
    rate = len(missing) / seconds if missing else None
    told = "" if rate is None else f" in {seconds:.1f} s ({rate:.1f} images/s)"
    print(f"{work.said(len(missing), len(images))}{told}: {options.out}")
    for remark in work.remarks():
        print(remark)
    lacking = folder.lacks(work.files(range(work.n)))
    if lacking:
        print(f"the other parts must still draw {lacking} images")
        return
    grid, shown = work.grid(folder.path / "images")
    folder.finish(
        grid,
        {
            **work.found(),
            "seconds": seconds,
            "images_per_second": rate,
            "grid": shown,
            "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        },
    )
    print(f"look at {options.out / 'grid.png'}")


def _draw(work: Work, names: Mapping[Any, str], folder: JobFolder) -> float:
    """Draw the images of these keys into files of these names; returns the seconds it took."""
    seconds = 0.0
    with image_progress(work.verb, len(names)) as advance:
        started = perf_counter()
        for keys, images in work.draw(list(names), advance):
            # Files are not counted: the rate is the model's.
            seconds += perf_counter() - started
            for key, image in zip(keys, images, strict=True):
                folder.write_image(names[key], image)
            started = perf_counter()
    return seconds


class Samples:
    """The work of `task=sample`: image i has labels[i % len(labels)].

    Where several labels fit side by side, each has a column of the grid, with its name above.
    """

    verb = "sampling"

    def __init__(
        self,
        model: ImageTransformer,
        options: SampleOptions,
        request: SamplingRequest,
        class_names: Sequence[str] | None,
    ) -> None:
        self.model = model
        self.options = options
        self.request = request
        self.class_names = class_names
        self.n = options.n or DEFAULT_IMAGES

    def entries(self) -> dict[str, Any]:
        return {}

    def files(self, images: range) -> dict[str, int]:
        return {_name(i): i for i in images}

    def prepare(self, folder: JobFolder, images: range) -> None:
        pass

    def draw(
        self, chosen: Sequence[int], progress: Callable[[float], None]
    ) -> Iterator[tuple[Sequence[int], UInt8[np.ndarray, "b h w c"]]]:
        from imagegen.generation.sampling_loop import draw_images

        waiting = iter(chosen)
        for batch in draw_images(
            self.model,
            chosen,
            request=replace(self.request, progress=progress),
            batch_size=self.options.batch_size,
        ):
            yield list(islice(waiting, len(batch))), to_display(batch, self.model.spec.levels)

    def grid(self, folder: Path) -> tuple[UInt8[np.ndarray, "H W c"], dict[str, int]]:
        spec = self.model.spec
        limit = min(self.n, grid_limit(spec.height, spec.width))
        images = np.stack([read_image(folder / _name(i), spec.channels) for i in range(limit)])
        return labelled_grid(images, self.request.labels, self.class_names), {"images": limit}

    def said(self, drawn: int, images: int) -> str:
        return f"{drawn} images"

    def found(self) -> dict[str, Any]:
        return {}

    def remarks(self) -> list[str]:
        return []


def _name(image: int) -> str:
    return f"{image:05d}.png"


def _part(n: int, part: tuple[int, int] | None) -> range:
    """The images of one of several processes: as many, within one, as every other has."""
    number, parts = part or (1, 1)
    return range(n * (number - 1) // parts, n * number // parts)


def _batch_size(options: SampleOptions) -> int:
    from imagegen.generation.sampling_loop import DEFAULT_BATCH

    return options.batch_size or DEFAULT_BATCH


def _request(
    model: ImageTransformer, options: SampleOptions, labels: Sequence[int] | None
) -> SamplingRequest:
    from imagegen.generation.sampling_request import SamplingRequest

    return SamplingRequest.of(
        model,
        options.seed,
        options.controls,
        labels,
        None,
        options.precision,
        batch_size=_batch_size(options),
    )


def labelled_grid(
    images: np.ndarray, labels: Sequence[int] | None, class_names: Sequence[str] | None
) -> np.ndarray:
    """A grid of images "n h w c" (0 to 255) with a column for each label, where there are some."""
    if labels is None:
        return make_grid(images)
    captions = [class_names[label] if class_names else str(label) for label in labels]
    if len(labels) == 1:
        return with_captions(make_grid(images), captions)
    if len(labels) > MAX_COLUMNS:
        return make_grid(images)
    columns = min(len(labels), len(images))
    return with_captions(make_grid(images, columns), captions[:columns])
