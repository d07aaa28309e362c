"""Batched generation and completion from the recurrent state.

Axes: `b` batch, `n` image, `k` completion, `h w c` height, width, channel.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from imagegen.decode import Decoder
from imagegen.drawing import Drawing, Progress, noise
from imagegen.errors import UserError
from imagegen.heads.controls import Controls
from imagegen.model import ImageTransformer, ModelState

DEFAULT_BATCH = 64

# Matrix products round differently for a handful of rows than for many. Batches are filled up to
# whole groups of this many rows, so that an image does not depend on what is drawn beside it.
ROW_GROUP = 16


def generate(
    model: ImageTransformer,
    n: int,
    *,
    seed: int = 0,
    controls: Controls | None = None,
    labels: Sequence[int] | None = None,
    batch_size: int | None = None,
    start: int = 0,
    precision: str = "auto",
    progress: Progress | None = None,
) -> Iterator[UInt8[np.ndarray, "b h w c"]]:
    """Draw images `start` to `start + n - 1` of `seed`.

    Args:
        model: draws on the device it lies on; its training mode is left as it was.
        n: number of images, at least 1.
        seed: 0 to 2^64 - 1. Image i of a seed is the same for every n, batch size and start.
        controls: temperatures, top_p and guidance; by default, what the model has learned is drawn.
        labels: image i is of class labels[i % len(labels)], 0 to n_classes - 1, or -1 for none;
            without them no image has a label.
        batch_size: images drawn together; 64 by default.
        precision: of the weights where a compiled loop draws: auto, 32, int16 or int8; see
            `imagegen.decode.choose_decoder`.
        progress: called with the (fractional) number of images done since the last call.

    Yields:
        Levels of finished images, at most batch_size at a time, in order.

    Raises:
        UserError: for numbers out of their range, and for labels or controls that the model does
        not have.
    """
    _check("n", n, 1)
    _check("start", start, 0)
    batch_size = _checked_settings(seed, batch_size)
    drawing = Drawing.of(model, seed, controls, labels, progress, precision)
    return _generate(model, n, drawing, batch_size, start)


def _generate(
    model: ImageTransformer, n: int, drawing: Drawing, batch_size: int, start: int
) -> Iterator[UInt8[np.ndarray, "b h w c"]]:
    for first in range(start, start + n, batch_size):
        streams = [(image, 0) for image in range(first, min(first + batch_size, start + n))]
        with _no_gradients(model):
            rows = _round_up(len(streams), ROW_GROUP)
            state = _initial_state(model, [image for image, _ in streams], rows, drawing)
            parameters, state = model.step(None, state)
            sequence = _continue(model, parameters, state, streams, drawing)
            images = model.raster.to_images(sequence).cpu().numpy()
        yield images


def complete(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    visible_rows: Sequence[int],
    completions: int,
    *,
    seed: int = 0,
    controls: Controls | None = None,
    labels: Sequence[int] | None = None,
    batch_size: int | None = None,
    precision: str = "auto",
    progress: Progress | None = None,
) -> UInt8[np.ndarray, "n k h w c"]:
    """Draw several continuations of the first rows of each image.

    The visible rows go through the parallel form once; the state behind them is then forked. They
    are kept bit for bit.

    Args:
        model: draws on the device it lies on; its training mode is left as it was.
        images: levels.
        visible_rows: for each image, the number of rows to keep, 0 to h.
        completions: continuations `k` of each image, at least 1. Continuation j of image i is the
            same for every number of images and continuations.
        seed, controls, labels, batch_size, precision: as in `generate`.
        progress: called with the (fractional) number of continuations done since the last call.

    Raises:
        UserError: as `generate`.
    """
    _check("completions", completions, 1)
    batch_size = _checked_settings(seed, batch_size)
    drawing = Drawing.of(model, seed, controls, labels, progress, precision)
    height = model.spec.height
    if len(visible_rows) != len(images):
        raise UserError(f"visible rows are given for {len(visible_rows)} of {len(images)} images.")
    for rows in visible_rows:
        if not 0 <= rows <= height:
            raise UserError(f"visible_rows={rows} must lie between 0 and the height, {height}.")

    result = np.repeat(images[:, None], completions, axis=1)
    alike = defaultdict(list)
    for index, rows in enumerate(visible_rows):
        alike[rows].append(index)
    width = min(completions, batch_size)
    for rows, members in alike.items():
        if rows == height:
            if progress:
                progress(len(members) * completions)
            continue
        for stream in range(0, completions, width):
            forks = range(stream, min(stream + width, completions))
            together = max(1, batch_size // len(forks))
            for first in range(0, len(members), together):
                chosen = members[first : first + together]
                result[chosen, forks.start : forks.stop] = _complete(
                    model, images[chosen], chosen, rows, forks, drawing
                )
    return result


def _complete(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    indices: Sequence[int],
    rows: int,
    forks: range,
    drawing: Drawing,
) -> UInt8[np.ndarray, "n k h w c"]:
    """Continuations `forks` of images that show the same number of rows."""
    filled = _round_up(len(images), ROW_GROUP // math.gcd(len(forks), ROW_GROUP))
    visible = torch.from_numpy(np.resize(images[:, :rows], (filled, rows, *images.shape[2:])))
    streams = [(image, fork) for image in indices for fork in forks]
    with _no_gradients(model):
        prefix = model.raster.to_sequence(visible.to(model.device))
        state = _initial_state(model, indices, filled, drawing)
        if rows:
            parameters, state = model.prefill(prefix.repeat(drawing.copies, 1, 1), state)
        else:
            parameters, state = model.step(None, state)
        sequence = _continue(
            model,
            parameters.repeat_interleave(len(forks), dim=0),
            state.repeat(len(forks)),
            streams,
            drawing,
        )
        prefix = prefix[: len(images)].repeat_interleave(len(forks), dim=0)
        drawn = model.raster.to_images(torch.cat([prefix, sequence], dim=1)).cpu().numpy()
    return drawn.reshape(len(images), len(forks), *images.shape[1:])


def _continue(
    model: ImageTransformer,
    parameters: Float[Tensor, "rows p"],
    state: ModelState,
    streams: Sequence[tuple[int, int]],
    drawing: Drawing,
) -> UInt8[Tensor, "b n s"]:
    """Draw the rest of the sequences, from the distribution of their next step on.

    There may be more rows than streams of random numbers; the rows beyond are dropped. With
    guidance, the second half of the rows is the first without labels.
    """
    first = state.position - 1
    steps = model.raster.length - first
    rows = parameters.shape[0] // drawing.copies
    uniforms = noise(model, drawing.seed, streams, first, rows)
    if drawing.decoder is not None:
        return _continue_compiled(drawing.decoder, parameters, state, uniforms, streams, drawing)
    numbers = torch.from_numpy(uniforms).to(parameters.device)
    sequence = torch.empty(
        rows, steps, model.raster.values_per_step, dtype=torch.uint8, device=parameters.device
    )
    for step in range(steps):
        if step:
            values = sequence[:, step - 1].repeat(drawing.copies, 1)
            parameters, state = model.step(values, state)
        if drawing.copies == 1:
            levels = model.head.sample(parameters, numbers[:, step], drawing.controls)
        else:
            with_labels, without = parameters.chunk(2)
            levels = model.head.sample_guided(
                with_labels, without, numbers[:, step], drawing.controls
            )
        sequence[:, step] = levels
        if drawing.progress:
            drawing.progress(len(streams) / steps)
    return sequence[: len(streams)]


def _continue_compiled(
    decoder: Decoder,
    parameters: Float[Tensor, "rows p"],
    state: ModelState,
    uniforms: Float[np.ndarray, "rows n u"],
    streams: Sequence[tuple[int, int]],
    drawing: Drawing,
) -> UInt8[Tensor, "b n s"]:
    """`_continue` by compiled code, which needs no rows beyond those that are asked for."""
    first, count, recent = state.position - 1, len(streams), state.recent
    values = recent.shape[-1]
    sequence = np.zeros((count, first + uniforms.shape[1], values), dtype=np.uint8)
    known = min(first, recent.shape[1])
    if known:
        sequence[:, first - known : first] = recent[:count, recent.shape[1] - known :].numpy()
    decoder.draw(state, parameters, sequence, uniforms, drawing.controls, drawing.progress)
    return torch.from_numpy(sequence[:, first:])


def _initial_state(
    model: ImageTransformer, images: Sequence[int], rows: int, drawing: Drawing
) -> ModelState:
    labels = drawing.labels_of(images, rows)
    on_device = None if labels is None else labels.to(model.device)
    return model.initial_state(rows * drawing.copies, on_device)


@contextmanager
def _no_gradients(model: ImageTransformer) -> Iterator[None]:
    """Without gradients or dropout, leaving the model as it was."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


def _round_up(count: int, group: int) -> int:
    return math.ceil(count / group) * group


def _check(name: str, value: int, low: int) -> None:
    if value < low:
        raise UserError(f"{name}={value} must be at least {low}.")


def _checked_settings(seed: int, batch_size: int | None) -> int:
    if not 0 <= seed < 2**64:
        raise UserError(f"seed={seed} must lie between 0 and 2^64 - 1.")
    if batch_size is None:
        return DEFAULT_BATCH
    _check("batch_size", batch_size, 1)
    return batch_size
