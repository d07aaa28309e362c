"""Where an image surprises a model: the bits of its pixels, and what was expected instead.

The bits of a pixel are -log2 of the probability of its values given all values before them. In the
order of the model's raster they sum to the bits of the image (chain rule), so that a map of them
shows which part of an image costs how much.

Axes: `n` image, `h w c` height, width, channel, `s` values per step, `p` parameters of the output
distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, Integer, UInt8
from torch import Tensor

from imagegen.core import values as opt
from imagegen.core.float64 import to_float64
from imagegen.core.inference import inference
from imagegen.evaluation.scores import default_batch
from imagegen.heads.base import OutputHead
from imagegen.model.transformer import ImageTransformer

STEPS = 1 << 10
"""Steps whose distributions over all levels are held at a time."""


def bits_of_pixels(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    labels: Int64[np.ndarray, " n"] | None = None,
    batch_size: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Float64[np.ndarray, "n h w"]:
    """Bits of each pixel, all channels together; the sum over pixels is that of the image.

    Args:
        model, images, labels, batch_size, progress: as in `score_images`.
    """
    found = np.empty(images.shape[:3])
    with inference(model):
        for batch, given, known in _batches(model, images, labels, batch_size):
            nats = -model.raster.arranged(model.log_prob(given, known))
            found[batch] = nats.cpu().double().sum(dim=-1).numpy() / math.log(2)
            if progress is not None:
                progress(len(given))
    return found


def likeliest(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    labels: Int64[np.ndarray, " n"] | None = None,
    batch_size: int | None = None,
) -> UInt8[np.ndarray, "n h w c"]:
    """The most probable level of each value given the image's own values before it.

    On a tie, the lowest of them. An image that is drawn at temperature 0 is its own likeliest.

    Args:
        model, images, labels, batch_size: as in `score_images`.
    """
    found = np.empty_like(images)
    with inference(model):
        for batch, given, known in _batches(model, images, labels, batch_size):
            sequence = model.raster.to_sequence(given)
            parameters = model.parameters_of(sequence, known)
            pieces = zip(
                parameters.flatten(0, 1).split(STEPS),
                sequence.flatten(0, 1).split(STEPS),
                strict=True,
            )
            best = torch.cat([_likeliest(model.head, *piece) for piece in pieces])
            found[batch] = model.raster.to_images(best.view_as(sequence)).cpu().numpy()
    return found


def distribution_at(
    model: ImageTransformer,
    image: UInt8[np.ndarray, "h w c"],
    row: int,
    column: int,
    channel: int = 0,
    label: int | None = None,
) -> Float64[np.ndarray, " levels"]:
    """Probability of every level of one value, given the image's values before it; the sum is 1.

    Steps that predict whole pixels take the channels in turn: a later channel is given the earlier
    ones of its pixel, as when the image is scored or drawn.

    Args:
        image: levels; those of the value itself and after it do not matter.
        row, column, channel: of the value, from 0.
        label: class of the image, for models that know some; None is no label.

    Raises:
        UserError: for a place outside of the image.
    """
    at = (row, column, channel)
    for name, index, size in zip(("row", "column", "channel"), at, image.shape, strict=True):
        opt.whole_number(index, name, 0, size - 1)
    raster, device = model.raster, model.device
    value = (row * image.shape[1] + column) * image.shape[2] + channel
    step, known = divmod(value, raster.values_per_step)
    sequence = raster.to_sequence(torch.from_numpy(np.array(image)).unsqueeze(0).to(device))
    labels = None if label is None else torch.tensor([label], device=device)
    with inference(model):
        # No step sees its own values, so those of the last one may stay.
        parameters = model.parameters_of(sequence[:, : step + 1], labels)[:, -1]
        parameters = to_float64(parameters)
        given = sequence[:, step, :known].to(parameters.device)
        probabilities = model.head.log_probabilities(parameters, given).exp()
    return probabilities[0].cpu().numpy()


def _batches(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    labels: Int64[np.ndarray, " n"] | None,
    batch_size: int | None,
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Images and their labels on the model's device, so many at a time, and where they were."""
    batch_size = batch_size or default_batch(model)
    for first in range(0, len(images), batch_size):
        batch = slice(first, first + batch_size)
        given = torch.from_numpy(np.array(images[batch])).to(model.device)
        yield (
            batch,
            given,
            None if labels is None else torch.from_numpy(labels[batch]).to(given.device),
        )


def _likeliest(
    head: OutputHead, parameters: Float[Tensor, "n p"], values: Integer[Tensor, "n s"]
) -> Int64[Tensor, "n s"]:
    best = [
        head.log_probabilities(parameters, values[:, :known]).argmax(dim=-1)
        for known in range(head.values_per_step)
    ]
    return torch.stack(best, dim=-1)
