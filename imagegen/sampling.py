"""The work behind `sample.py`: draw new images, or complete partial ones, into a folder.

The folder holds `images/`, `grid.png` and `manifest.json`. It appears as a whole when all is drawn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from imagegen import options as opt
from imagegen.completion import draw_completions, read_partial
from imagegen.errors import UserError
from imagegen.images import (
    encode_png,
    grid_limit,
    make_grid,
    save_png,
    to_display,
    with_captions,
)
from imagegen.output import staged_folder, write_atomic
from imagegen.progress import image_progress
from imagegen.provenance import load_source, versions
from imagegen.sample_options import SampleOptions

if TYPE_CHECKING:
    from imagegen.model import ImageTransformer

DEFAULT_IMAGES = 64
MAX_COLUMNS = 32  # labels side by side in a grid

_OWNED = ("grid.png", "images", "manifest.json")
_IMAGE_NAME = re.compile(r"\d{5,}(-[a-z0-9]+)?\.png")


def run(config: Mapping[str, Any]) -> Path:
    """Do what `conf/sample.yaml` and the command line ask; print where the result is.

    Returns:
        the folder written.

    Raises:
        UserError: for anything that cannot be; then nothing is written.
    """
    options = SampleOptions.from_config(opt.plain(config))
    _check_out(options.out)
    device = opt.resolve_device(options.device)
    source = load_source(options.ckpt, device)
    model = source.loaded.model
    names = source.loaded.metadata.get("class_names")
    labels = opt.labels_of(options.label, names, model.n_classes)
    partial = read_partial(source.loaded, options) if options.task == "complete" else None
    with staged_folder(options.out, owned=_OWNED) as folder:
        (folder / "images").mkdir()
        if partial is None:
            result = draw_samples(model, options, labels, names, folder)
        else:
            result = draw_completions(model, options, labels, partial, folder)
        manifest = {
            "task": options.task,
            **source.to_dict(),
            "seed": options.seed,
            **asdict(options.controls),
            "labels": labels,
            **result,
            "image_shape": list(model.spec.shape),
            "levels": model.spec.levels,
            "device": str(device),
            "created": datetime.now().astimezone().isoformat(timespec="seconds"),
            **versions(),
        }
        write_atomic(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    drawn, rate = result["n"] * result.get("completions", 1), result["images_per_second"]
    what = "images" if partial is None else f"completions of {result['n']} images"
    print(f"{drawn} {what} in {drawn / rate:.1f} s ({rate:.1f} images/s): {options.out}")
    print(f"look at {options.out / 'grid.png'}")
    return options.out


def draw_samples(
    model: ImageTransformer,
    options: SampleOptions,
    labels: Sequence[int] | None,
    class_names: Sequence[str] | None,
    folder: Path,
) -> dict[str, Any]:
    """Draw `n` images, writing each batch into `folder` as it is finished, then a grid.

    Image i has labels[i % len(labels)]. Where several labels fit side by side, each has a column of
    the grid, with its name above.

    Returns:
        the entries of the manifest that say what was done.
    """
    from imagegen.generate import DEFAULT_BATCH, generate

    spec = model.spec
    n = options.n or DEFAULT_IMAGES
    shown: list[np.ndarray] = []
    limit = min(n, grid_limit(spec.height, spec.width))
    index, seconds = 0, 0.0
    with image_progress("sampling", n) as advance:
        batches = generate(
            model,
            n,
            seed=options.seed,
            controls=options.controls,
            labels=labels,
            batch_size=options.batch_size,
            progress=advance,
        )
        started = perf_counter()
        for batch in batches:
            # Files are not counted: the rate is the model's.
            seconds += perf_counter() - started
            for image in to_display(batch, spec.levels):
                (folder / "images" / f"{index:05d}.png").write_bytes(encode_png(image))
                if index < limit:
                    shown.append(image)
                index += 1
            started = perf_counter()
    save_png(folder / "grid.png", _labelled_grid(np.stack(shown), labels, class_names))
    return {
        "n": n,
        "batch_size": options.batch_size or DEFAULT_BATCH,
        "seconds": seconds,
        "images_per_second": n / seconds,
        "grid": {"images": limit},
    }


def _labelled_grid(
    images: np.ndarray, labels: Sequence[int] | None, class_names: Sequence[str] | None
) -> np.ndarray:
    if labels is None:
        return make_grid(images)
    captions = [class_names[label] if class_names else str(label) for label in labels]
    if len(labels) == 1:
        return with_captions(make_grid(images), captions)
    if len(labels) > MAX_COLUMNS:
        return make_grid(images)
    columns = min(len(labels), len(images))
    return with_captions(make_grid(images, columns), captions[:columns])


def _check_out(out: Path) -> None:
    """Refuse a folder whose content is not a result of this command: it would be replaced."""
    try:
        names = {path.name for path in out.iterdir()} if out.exists() else set()
        # What a killed process left: `staged_folder` knows it.
        names = {name for name in names if not name.endswith(".partial")}
        images = [path.name for path in (out / "images").glob("*")] if names else []
    except OSError as error:
        raise UserError(f"out={out} is not a folder that can be used: {error.strerror}.") from error
    if names and not (
        names <= set(_OWNED)
        and _is_manifest(out / "manifest.json")
        and all(_IMAGE_NAME.fullmatch(name) for name in images)
    ):
        raise UserError(
            f"out={out} holds files that sample.py did not write; name a new or an empty folder."
        )


def _is_manifest(path: Path) -> bool:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and "checkpoint_sha256" in manifest
