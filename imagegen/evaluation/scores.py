"""Score a checkpoint on a split: `imagegen evaluate ckpt=… split=test out=FILE.json`.

bits/dim of an image is its negative log2-likelihood divided by all height * width * channels
dimensions. The mean is taken over images, never over batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from imagegen.core import values as opt
from imagegen.core.errors import UserError
from imagegen.core.files import ensure_writable, write_atomic
from imagegen.core.machine import describe
from imagegen.core.progress import image_progress
from imagegen.data.base import SPLIT_NAMES
from imagegen.data.regions import Region, read_region
from imagegen.generation.options import PRECISIONS

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
    return _checked(scores)


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


@dataclass(frozen=True)
class ScoreOptions:
    """What to score and how, as `conf/evaluate.yaml` says.

    Attributes:
        dataset: options of the checkpoint's data set to replace.
        visible: the pixels that are kept, if those hidden are to be scored given them.
        particles: of an image that needs them; None if nobody has said.
        out: JSON file to write, if any.
    """

    ckpt: str
    split: str
    batch_size: int | None
    limit: int | None
    labels: bool
    classify: bool
    precision: str | None
    visible: Region | None
    particles: int | None
    dataset: Mapping[str, Any]
    device: str
    out: Path | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ScoreOptions:
        """Check the plain values of `conf/evaluate.yaml`.

        Raises:
            UserError: naming the first option that cannot be.
        """
        options = cls(
            ckpt=opt.checkpoint_path(config["ckpt"]),
            split=opt.choice(config["split"], "split", SPLIT_NAMES),
            batch_size=opt.optional_whole_number(config["batch_size"], "batch_size", 1),
            limit=opt.optional_whole_number(config["limit"], "limit", 1),
            labels=opt.flag(config["labels"], "labels"),
            classify=opt.flag(config["classify"], "classify"),
            precision=None
            if config["precision"] is None
            else opt.choice(str(config["precision"]), "precision", PRECISIONS),
            visible=None if config["visible"] is None else read_region(config["visible"]),
            particles=opt.optional_whole_number(config["particles"], "particles", 1),
            dataset=config["dataset"] or {},
            device=str(config["device"]),
            out=None if config["out"] is None else opt.one_path(config["out"], "out"),
        )
        if options.classify and options.precision is not None:
            raise UserError("precision and classify=true do not go together; leave one out.")
        if options.visible is None and options.particles is not None:
            raise UserError(f"particles={options.particles} needs visible=; add it.")
        for name in ("precision", "classify"):
            if options.visible is not None and getattr(options, name):
                raise UserError(f"visible and {name} do not go together; leave one out.")
        if options.classify and not options.labels:
            raise UserError("labels=false and classify=true do not go together; leave one out.")
        if options.out is not None:
            ensure_writable(options.out)
        return options


def run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Do what `conf/evaluate.yaml` and the command line ask; print bits/dim in one line.

    Returns:
        what is written to `out`, if that is given.

    Raises:
        UserError: for anything that cannot be; then nothing is written.
    """
    from imagegen.checkpoint.provenance import load_source, versions
    from imagegen.checkpoint.training_data import count_trained_on, dataset_of

    options = ScoreOptions.from_config(opt.plain(config))
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
    scores, found = _scored(model, images, labels, options)
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
        return _checked(scores), said
    with image_progress("evaluating", len(images)) as advance:
        if options.classify and labels is not None:
            every = classify_images(model, images, options.batch_size, advance)
            accuracy = float((every.argmin(axis=1) == labels).mean())
            return every[np.arange(len(images)), labels], {"accuracy": accuracy}
        scores = score_images(model, images, options.batch_size, advance, labels, options.precision)
        return scores, {}


def _checked(scores: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """The scores, if all are finite.

    Raises:
        UserError: for others.
    """
    wrong = np.flatnonzero(~np.isfinite(scores))
    if wrong.size:
        raise UserError(
            f"the model scores image {wrong[0]} as {scores[wrong[0]]} bits/dim, so its training "
            "must have diverged; evaluate another checkpoint."
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
