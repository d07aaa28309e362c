"""Batched generation and completion from the recurrent state.

Axes: `b` batch, `n` image, `k` completion, `h w c` height, width, channel.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from imagegen.errors import UserError
from imagegen.model import ImageTransformer, ModelState

DEFAULT_BATCH = 64

# Matrix products round differently for a handful of rows than for many. Batches are filled up to
# whole groups of this many rows, so that an image does not depend on what is drawn beside it.
ROW_GROUP = 16

Progress = Callable[[float], None]


def uniforms(seed: int, image: int, stream: int, count: int) -> Float[np.ndarray, " count"]:
    """The random numbers of one image: float64 in the open interval (0, 1).

    They come from a Philox counter keyed by (seed, image), so that image i of a seed is the same
    whatever is drawn beside it; `stream` tells several completions of one image apart.
    """
    bits = np.random.Philox(key=[seed, image], counter=[0, 0, 0, stream]).random_raw(count)
    numbers: np.ndarray = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return numbers


def generate(
    model: ImageTransformer,
    n: int,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    batch_size: int | None = None,
    start: int = 0,
    progress: Progress | None = None,
) -> Iterator[UInt8[np.ndarray, "b h w c"]]:
    """Draw images `start` to `start + n - 1` of `seed`.

    Args:
        model: draws on the device it lies on; its training mode is left as it was.
        n: number of images, at least 1.
        seed: 0 to 2^64 - 1. Image i of a seed is the same for every n, batch size and start.
        temperature: see `OutputHead.sample`.
        batch_size: images drawn together; 64 by default.
        progress: called with the (fractional) number of images done since the last call.

    Yields:
        Levels of finished images, at most batch_size at a time, in order.

    Raises:
        UserError: for numbers out of their range.
    """
    _check("n", n, 1)
    _check("start", start, 0)
    batch_size = _checked_settings(seed, temperature, batch_size)
    return _generate(model, n, seed, temperature, batch_size, start, progress)


def _generate(
    model: ImageTransformer,
    n: int,
    seed: int,
    temperature: float,
    batch_size: int,
    start: int,
    progress: Progress | None,
) -> Iterator[UInt8[np.ndarray, "b h w c"]]:
    for first in range(start, start + n, batch_size):
        streams = [(image, 0) for image in range(first, min(first + batch_size, start + n))]
        with _drawing(model):
            rows = _round_up(len(streams), ROW_GROUP)
            parameters, state = model.step(None, model.initial_state(rows))
            sequence = _continue(model, parameters, state, seed, streams, temperature, progress)
            images = model.raster.to_images(sequence).cpu().numpy()
        yield images


def complete(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    visible_rows: Sequence[int],
    completions: int,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    batch_size: int | None = None,
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
        seed, temperature, batch_size: as in `generate`.
        progress: called with the (fractional) number of continuations done since the last call.

    Raises:
        UserError: for numbers out of their range.
    """
    _check("completions", completions, 1)
    batch_size = _checked_settings(seed, temperature, batch_size)
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
                    model, images[chosen], chosen, rows, forks, seed, temperature, progress
                )
    return result


def _complete(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    indices: Sequence[int],
    rows: int,
    forks: range,
    seed: int,
    temperature: float,
    progress: Progress | None,
) -> UInt8[np.ndarray, "n k h w c"]:
    """Continuations `forks` of images that show the same number of rows."""
    filled = _round_up(len(images), ROW_GROUP // math.gcd(len(forks), ROW_GROUP))
    visible = torch.from_numpy(np.resize(images[:, :rows], (filled, rows, *images.shape[2:])))
    streams = [(image, fork) for image in indices for fork in forks]
    with _drawing(model):
        prefix = model.raster.to_sequence(visible.to(model.norm.weight.device))
        if rows:
            parameters, state = model.prefill(prefix)
        else:
            parameters, state = model.step(None, model.initial_state(filled))
        sequence = _continue(
            model,
            parameters.repeat_interleave(len(forks), dim=0),
            state.repeat(len(forks)),
            seed,
            streams,
            temperature,
            progress,
        )
        prefix = prefix[: len(images)].repeat_interleave(len(forks), dim=0)
        drawn = model.raster.to_images(torch.cat([prefix, sequence], dim=1)).cpu().numpy()
    return drawn.reshape(len(images), len(forks), *images.shape[1:])


def _continue(
    model: ImageTransformer,
    parameters: Float[Tensor, "rows p"],
    state: ModelState,
    seed: int,
    streams: Sequence[tuple[int, int]],
    temperature: float,
    progress: Progress | None,
) -> UInt8[Tensor, "b n s"]:
    """Draw the rest of the sequences, from the distribution of their next step on.

    There may be more rows than streams of random numbers; the rows beyond are dropped.
    """
    first = state.position - 1
    steps = model.raster.length - first
    per_value = model.head.uniforms_per_value
    # Noise belongs to a position: a completion's does not depend on how much is visible.
    skip, count = first * per_value, steps * per_value
    noise = np.stack(
        [uniforms(seed, image, stream, skip + count)[skip:] for image, stream in streams]
    )
    noise = np.resize(noise, (parameters.shape[0], count))
    drawn = torch.from_numpy(noise).to(parameters.device).unflatten(1, (steps, per_value))
    sequence = torch.empty(
        parameters.shape[0],
        steps,
        model.raster.values_per_step,
        dtype=torch.uint8,
        device=parameters.device,
    )
    for step in range(steps):
        if step:
            parameters, state = model.step(sequence[:, step - 1], state)
        level = model.head.sample(parameters, drawn[:, step], temperature)
        sequence[:, step, 0] = level
        if progress:
            progress(len(streams) / steps)
    return sequence[: len(streams)]


@contextmanager
def _drawing(model: ImageTransformer) -> Iterator[None]:
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


def _checked_settings(seed: int, temperature: float, batch_size: int | None) -> int:
    if not 0 <= seed < 2**64:
        raise UserError(f"seed={seed} must lie between 0 and 2^64 - 1.")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"temperature={temperature} must be a finite number of at least 0.")
    if batch_size is None:
        return DEFAULT_BATCH
    _check("batch_size", batch_size, 1)
    return batch_size
