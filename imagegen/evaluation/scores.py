"""Score a checkpoint on a split: `imagegen evaluate ckpt=… split=test out=FILE.json`.

bits/dim of an image is its negative log2-likelihood divided by all height * width * channels
dimensions. The mean is taken over images, never over batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from imagegen.core import values as opt
from imagegen.core.errors import UserError
from imagegen.core.files import staged_folder, write_atomic
from imagegen.core.machine import describe
from imagegen.core.progress import image_progress
from imagegen.evaluation.score_options import ScoreOptions

if TYPE_CHECKING:
    from torch import Tensor

    from imagegen.checkpoint.reading import LoadedCheckpoint
    from imagegen.data.base import ImageDataset, ImageSplit
    from imagegen.model.transformer import ImageTransformer

POSITIONS = {"cpu": 1 << 14, "cuda": 1 << 18}
"""Dimensions scored together by default: few enough for a CPU's cache, enough to fill a GPU."""


def score_images(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    batch_size: int | None = None,
    progress: Callable[[float], None] | None = None,
    labels: Int64[np.ndarray, " n"] | None = None,
    precision: str | None = None,
) -> Float64[np.ndarray, " n"]:
    """bits/dim of each image, whatever the batch size.

    Args:
        model: scores on its device, in eval mode; its mode is left as it was.
        images: levels; may be memory-mapped.
        labels: classes of the images, for models that know them; -1 is no label.
        batch_size: images scored together; by default as many as make `POSITIONS` dimensions.
        progress: called with the number of images done since the last call.
        precision: score as the compiled loop draws, step by step in this precision (see
            `imagegen.generation.decode.choose_decoder`); by default by the parallel form.

    Raises:
        UserError: where a score is not finite, as with a diverged model, or where no compiled loop
            draws from the model in that precision.
    """
    import torch

    from imagegen.core.inference import inference

    bits_per_dim = model.bits_per_dim if precision is None else _as_drawn(model, precision)
    device = model.device
    batch_size = batch_size or default_batch(model)
    scores = np.empty(len(images), dtype=np.float64)
    with inference(model):
        for first in range(0, len(images), batch_size):
            batch = torch.from_numpy(np.array(images[first : first + batch_size]))
            known = None
            if labels is not None:
                known = torch.from_numpy(labels[first : first + batch_size]).to(device)
            bits = bits_per_dim(batch.to(device), known)
            scores[first : first + len(batch)] = bits.cpu().double().numpy()
            if progress is not None:
                progress(len(batch))
    return checked(scores)


def default_batch(model: ImageTransformer) -> int:
    """Images that are scored together."""
    return max(1, POSITIONS.get(model.device.type, 1 << 14) // model.spec.dims)


def _as_drawn(model: ImageTransformer, precision: str) -> Callable[[Tensor, Tensor | None], Tensor]:
    """bits/dim of images "b h w c" and their labels in the arithmetic of the compiled loop.

    All tensors are on the model's device.
    """
    from imagegen.generation.decode import parameters_as_drawn

    def bits_per_dim(images: Tensor, labels: Tensor | None) -> Tensor:
        sequence = model.raster.to_sequence(images)
        parameters = parameters_as_drawn(model, sequence, labels, precision)
        nats: Tensor = -model.head.log_prob(parameters, sequence).mean((1, 2))
        return nats / math.log(2)

    return bits_per_dim


def classify_images(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    batch_size: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Float64[np.ndarray, "n classes"]:
    """bits/dim of each image under each label: -log2 p(image | label) / dims.

    The least of a row is the class that a generative classifier chooses, argmax_y log p(x | y),
    with all classes alike beforehand.

    Args:
        model, images, batch_size: as in `score_images`.
        progress: called with the (fractional) number of images done since the last call.

    Raises:
        UserError: for a model without classes, and as `score_images`.
    """
    classes = _n_classes(model)
    advance = None if progress is None else (lambda done: progress(done / classes))
    scores = [
        score_images(model, images, batch_size, advance, np.full(len(images), label))
        for label in range(classes)
    ]
    return np.stack(scores, axis=1)


def _n_classes(model: ImageTransformer) -> int:
    if model.n_classes is None:
        raise UserError(
            "classify=true needs a model trained with labels; train one with "
            "model.conditional=true."
        )
    return model.n_classes


def standard_error(scores: Float64[np.ndarray, " n"]) -> float | None:
    """Standard error of the mean over images; None for a single image."""
    if len(scores) < 2:
        return None
    return float(scores.std(ddof=1) / math.sqrt(len(scores)))


def run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Do what `conf/evaluate.yaml` and the command line ask; print bits/dim in one line.

    With `maps`, print some images as well, the most surprising first.

    Returns:
        what is written to `out`, if that is given.

    Raises:
        UserError: for anything that cannot be; then nothing is written.
    """
    options = ScoreOptions.from_config(opt.plain(config))
    if options.maps is None:
        return _run(options, None)
    with staged_folder(options.maps, owned=()) as folder:
        result = _run(options, folder)
    print(f"maps: {options.maps}")
    return result


def _run(options: ScoreOptions, maps: Path | None) -> dict[str, Any]:
    """`run`, with an empty folder to fill with maps, if any."""
    from imagegen.checkpoint.provenance import load_source, versions
    from imagegen.checkpoint.training_data import count_trained_on, dataset_of

    device = opt.resolve_device(options.device)
    source = load_source(options.ckpt, device)
    model, metadata = source.loaded.model, source.loaded.metadata
    dataset = dataset_of(metadata, options.dataset, model.spec)
    data = dataset.split(options.split)
    images = data.images[: options.limit]
    if not len(images):
        raise UserError(
            f"the {options.split} split of {dataset.name} holds no images; choose another."
        )
    labels = _labels(options, source.loaded, dataset, data)
    trained_on = count_trained_on(metadata, dataset, options.split, len(images))
    started = perf_counter()
    if maps is None:
        scores, found = _scored(model, images, labels, options)
    else:
        scores, found = _mapped(maps, source.loaded, images, labels, options, dataset, data)
    result = {
        "bits_per_dim" if options.visible is None else "bits_per_hidden_value": float(
            scores.mean()
        ),
        "standard_error": standard_error(scores),
        "given_labels": labels is not None and model.n_classes is not None,
        **found,
        "precision": options.precision,
        "images": len(images),
        "images_trained_on": trained_on,
        "dims": model.spec.dims,
        "dataset": dataset.name,
        "split": options.split,
        **source.to_dict(),
        "seconds": perf_counter() - started,
        "machine": describe(device),
        **versions(),
    }
    # Printed first, so that a disk that fills up meanwhile does not cost the result.
    print(summary(result))
    for row in result.get("most_surprising", ()):
        print(f"  {row['said']}")
    if options.out is not None:
        write_atomic(options.out, json.dumps(result, indent=2) + "\n")
    return result


def _labels(
    options: ScoreOptions, loaded: LoadedCheckpoint, dataset: ImageDataset, data: ImageSplit
) -> Int64[np.ndarray, " n"] | None:
    """The classes of the images to score, as the model numbers them; None where none are used.

    Raises:
        UserError: where they are needed and the data set has none.
    """
    from imagegen.checkpoint.training_data import class_numbers

    known = loaded.model.n_classes is not None
    if not (options.classify or (options.labels and known)):
        return None
    if data.labels is None:
        raise UserError(
            f"data set {dataset.name} has no labels to score with; add labels=false and leave "
            "classify out."
        )
    labels = data.labels[: options.limit]
    return class_numbers(loaded.metadata, dataset)[labels] if known else labels


def _scored(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    labels: Int64[np.ndarray, " n"] | None,
    options: ScoreOptions,
) -> tuple[Float64[np.ndarray, " n"], dict[str, Any]]:
    """bits/dim of each image, or per hidden value, and what else there is to say of them."""
    if options.visible is not None:
        from imagegen.evaluation.hidden import score_region

        batch_size = options.batch_size or default_batch(model)
        scores, said = score_region(
            model, images, options.visible, labels, options.particles, batch_size
        )
        return checked(scores), said
    if options.classify and labels is not None:
        with image_progress("classifying", len(images)) as advance:
            every = classify_images(model, images, options.batch_size, advance)
        accuracy = float((every.argmin(axis=1) == labels).mean())
        return every[np.arange(len(images)), labels], {"accuracy": accuracy}
    with image_progress("evaluating", len(images)) as advance:
        scores = score_images(model, images, options.batch_size, advance, labels, options.precision)
        return scores, {}


def _mapped(
    folder: Path,
    loaded: LoadedCheckpoint,
    images: UInt8[np.ndarray, "n h w c"],
    labels: Int64[np.ndarray, " n"] | None,
    options: ScoreOptions,
    dataset: ImageDataset,
    data: ImageSplit,
) -> tuple[Float64[np.ndarray, " n"], dict[str, Any]]:
    """bits/dim of each image, whose maps are drawn on the way, and the most surprising ones."""
    from imagegen.evaluation.maps import PRINTED, write_maps

    model, known, found = loaded.model, None, {}
    if options.classify:
        _n_classes(model)
        known = loaded.class_names
    names = [""] * len(images)
    if data.labels is not None:
        classes = dataset.class_names
        names = [classes[y] if classes else str(y) for y in data.labels[: len(images)]]
    sources = dataset.sources(options.split)
    with image_progress("evaluating", len(images)) as advance:
        rows = write_maps(
            folder, model, images, labels, sources, names, options.batch_size, advance, known
        )
    scores = np.empty(len(rows))
    scores[[row.index for row in rows]] = [row.bits_per_dim for row in rows]
    if known is not None and labels is not None:
        best = [row.rival and row.rival.label == known[labels[row.index]] for row in rows]
        found["accuracy"] = best.count(True) / len(best)
    first = [{**asdict(row), "said": row.said} for row in rows[:PRINTED]]
    return scores, {**found, "maps": str(options.maps), "most_surprising": first}


def checked(scores: Float64[np.ndarray, " n"], first: int = 0) -> Float64[np.ndarray, " n"]:
    """The scores of images, counted from `first`, if all are finite.

    Raises:
        UserError: for others.
    """
    wrong = np.flatnonzero(~np.isfinite(scores))
    if wrong.size:
        raise UserError(
            f"the model scores image {first + wrong[0]} as {scores[wrong[0]]} bits/dim, so its "
            "training must have diverged; evaluate another checkpoint."
        )
    return scores


def summary(result: Mapping[str, Any]) -> str:
    """One line that says what `run` found."""
    error = result["standard_error"]
    spread = "" if error is None else f" ± {error:.4f}"
    given = " given their labels" if result["given_labels"] else ""
    if result["precision"] is not None:
        given += f" as drawn with precision={result['precision']}"
    score, unit = result.get("bits_per_dim"), "bits/dim"
    if score is None:
        from imagegen.evaluation.hidden import in_words

        score, unit = result["bits_per_hidden_value"], f"bits per hidden value ({in_words(result)})"
    line = (
        f"{score:.4f}{spread} {unit} over {result['images']} images of "
        f"{result['dims']} dimensions{given} ({result['dataset']}, {result['split']})"
    )
    if "accuracy" in result:
        line += f"; {result['accuracy']:.2%} classified rightly"
    return line
