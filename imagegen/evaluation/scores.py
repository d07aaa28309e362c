"""Score a checkpoint on a split: `imagegen evaluate ckpt=… split=test out=FILE.json`.

bits/dim of an image is its negative log2-likelihood divided by all height * width * channels
dimensions. The mean is taken over images, never over batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from imagegen.core import values as opt
from imagegen.core.errors import UserError
from imagegen.core.files import ensure_writable, write_atomic
from imagegen.core.machine import describe
from imagegen.core.progress import image_progress
from imagegen.generation.options import PRECISIONS

if TYPE_CHECKING:
    from torch import Tensor

    from imagegen.model.transformer import ImageTransformer

SPLITS = ("train", "val", "test")
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
    device = next(model.parameters()).device
    batch_size = batch_size or max(1, POSITIONS.get(device.type, 1 << 14) // model.spec.dims)
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
    wrong = np.flatnonzero(~np.isfinite(scores))
    if wrong.size:
        raise UserError(
            f"the model scores image {wrong[0]} as {scores[wrong[0]]} bits/dim, so its training "
            "must have diverged; evaluate another checkpoint."
        )
    return scores


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
    classes = model.n_classes
    if classes is None:
        raise UserError(
            "classify=true needs a model trained with labels; train one with "
            "model.conditional=true."
        )
    advance = None if progress is None else (lambda done: progress(done / classes))
    scores = [
        score_images(model, images, batch_size, advance, np.full(len(images), label))
        for label in range(classes)
    ]
    return np.stack(scores, axis=1)


def standard_error(scores: Float64[np.ndarray, " n"]) -> float | None:
    """Standard error of the mean over images; None for a single image."""
    if len(scores) < 2:
        return None
    return float(scores.std(ddof=1) / math.sqrt(len(scores)))


def run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Do what `conf/evaluate.yaml` and the command line ask; print bits/dim in one line.

    Returns:
        what is written to `out`, if that is given.

    Raises:
        UserError: for anything that cannot be; then nothing is written.
    """
    from imagegen.checkpoint.provenance import load_source, versions
    from imagegen.checkpoint.training_data import class_numbers, count_trained_on, dataset_of

    config = opt.plain(config)
    ckpt = opt.checkpoint_path(config["ckpt"])
    split = opt.choice(config["split"], "split", SPLITS)
    batch_size = opt.optional_whole_number(config["batch_size"], "batch_size", 1)
    limit = opt.optional_whole_number(config["limit"], "limit", 1)
    with_labels = opt.flag(config["labels"], "labels")
    classify = opt.flag(config["classify"], "classify")
    precision = config["precision"]
    if precision is not None:
        precision = opt.choice(str(precision), "precision", PRECISIONS)
    if classify and precision is not None:
        raise UserError("precision and classify=true do not go together; leave one out.")
    if classify and not with_labels:
        raise UserError("labels=false and classify=true do not go together; leave one out.")
    out = None if config["out"] is None else opt.one_path(config["out"], "out")
    if out is not None:
        ensure_writable(out)
    device = opt.resolve_device(config["device"])
    source = load_source(ckpt, device)
    model = source.loaded.model
    dataset = dataset_of(source.loaded.metadata, config["dataset"], model.spec)
    data = dataset.split(split)
    images, labels = data.images[:limit], None
    if not len(images):
        raise UserError(f"the {split} split of {dataset.name} holds no images; choose another.")
    if classify or (with_labels and model.n_classes is not None):
        labels = None if data.labels is None else data.labels[:limit]
        if labels is None:
            raise UserError(
                f"data set {dataset.name} has no labels to score with; add labels=false and leave "
                "classify out."
            )
        if model.n_classes is not None:
            labels = class_numbers(source.loaded.metadata, dataset)[labels]
    trained_on = count_trained_on(source.loaded.metadata, dataset, split, len(images))
    started = perf_counter()
    classified: dict[str, Any] = {}
    with image_progress("evaluating", len(images)) as advance:
        if classify and labels is not None:
            every = classify_images(model, images, batch_size, advance)
            scores = every[np.arange(len(images)), labels]
            classified = {"accuracy": float((every.argmin(axis=1) == labels).mean())}
        else:
            scores = score_images(model, images, batch_size, advance, labels, precision)
    result = {
        "bits_per_dim": float(scores.mean()),
        "standard_error": standard_error(scores),
        "given_labels": labels is not None and model.n_classes is not None,
        **classified,
        "precision": precision,
        "images": len(images),
        "images_trained_on": trained_on,
        "dims": model.spec.dims,
        "dataset": dataset.name,
        "split": split,
        **source.to_dict(),
        "seconds": perf_counter() - started,
        "machine": describe(device),
        **versions(),
    }
    # Printed first, so that a disk that fills up meanwhile does not cost the result.
    print(summary(result))
    if out is not None:
        write_atomic(out, json.dumps(result, indent=2) + "\n")
    return result


def summary(result: Mapping[str, Any]) -> str:
    """One line that says what `run` found."""
    error = result["standard_error"]
    spread = "" if error is None else f" ± {error:.4f}"
    given = " given their labels" if result["given_labels"] else ""
    if result["precision"] is not None:
        given += f" as drawn with precision={result['precision']}"
    line = (
        f"{result['bits_per_dim']:.4f}{spread} bits/dim over {result['images']} images of "
        f"{result['dims']} dimensions{given} ({result['dataset']}, {result['split']})"
    )
    if "accuracy" in result:
        line += f"; {result['accuracy']:.2%} classified rightly"
    return line
