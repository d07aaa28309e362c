"""Batched generation and completion from the recurrent state.

Image i of a seed is drawn from the same random numbers whatever is drawn beside it, on every
device. On the CPU its levels are then the same too, bit for bit. On a GPU, libraries choose their
algorithms by the number of rows, in ways of their own: where two of them round differently, a level
at the edge of a random number may fall otherwise, and with it all that follow. `imagegen.verify`
measures it.

Axes: `b` batch, `n` image, `k` completion, `h w c` height, width, channel.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import UInt8

from imagegen.drawing import Drawing, Progress, continue_sequences, initial_state, no_gradients
from imagegen.errors import UserError
from imagegen.heads.controls import Controls
from imagegen.model import ImageTransformer

DEFAULT_BATCH = 64

# Matrix products round differently for a handful of rows than for many. Batches are filled up to
# whole groups of this many rows, so that an image does not depend on what is drawn beside it: found
# with the libraries that PyTorch uses on CPUs.
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
        model: draws on its device; its training mode is left as it was.
        n: number of images, at least 1.
        seed: 0 to 2^64 - 1. Image i of a seed has the same random numbers for every n, batch size
            and start; on the CPU it is the same image, on other devices but for their rounding.
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
    drawing = Drawing.of(model, seed, controls, labels, progress, precision)
    return draw_images(model, range(start, start + n), drawing, batch_size)


def draw_images(
    model: ImageTransformer, chosen: Sequence[int], drawing: Drawing, batch_size: int | None = None
) -> Iterator[UInt8[np.ndarray, "b h w c"]]:
    """`generate` for any choice of the images of a seed, drawn in the order given."""
    return _draw(model, chosen, drawing, _checked_batch(batch_size))


def _draw(
    model: ImageTransformer, chosen: Sequence[int], drawing: Drawing, batch_size: int
) -> Iterator[UInt8[np.ndarray, "b h w c"]]:
    for first in range(0, len(chosen), batch_size):
        streams = [(image, 0) for image in chosen[first : first + batch_size]]
        with no_gradients(model):
            rows = _round_up(len(streams), ROW_GROUP)
            state = initial_state(model, [image for image, _ in streams], rows, drawing)
            parameters, state = model.step(None, state)
            sequence = continue_sequences(model, parameters, state, streams, drawing)
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
        model: draws on its device; its training mode is left as it was.
        images: levels.
        visible_rows: for each image, the number of rows to keep, 0 to h.
        completions: continuations `k` of each image, at least 1. Continuation j of image i has the
            same random numbers for every number of images and continuations; see `generate` for
            where it is the same image.
        seed, controls, labels, batch_size, precision: as in `generate`.
        progress: called with the (fractional) number of continuations done since the last call.

    Raises:
        UserError: as `generate`.
    """
    _check("completions", completions, 1)
    chosen = [(image, fork) for image in range(len(images)) for fork in range(completions)]
    drawing = Drawing.of(model, seed, controls, labels, progress, precision)
    result = np.repeat(images[:, None], completions, axis=1)
    pieces = draw_completions(model, images, visible_rows, chosen, drawing, batch_size)
    for pairs, drawn in pieces:
        result[tuple(zip(*pairs, strict=True))] = drawn
    return result


def draw_completions(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    visible_rows: Sequence[int],
    chosen: Sequence[tuple[int, int]],
    drawing: Drawing,
    batch_size: int | None = None,
) -> Iterator[tuple[list[tuple[int, int]], UInt8[np.ndarray, "b h w c"]]]:
    """`complete` for any choice of (image, completion), as they are finished.

    Yields:
        Which they are and their levels, at most batch_size at a time; those of images that show as
        many rows, and lack the same completions, come together.
    """
    batch_size = _checked_batch(batch_size)
    height = model.spec.height
    if len(visible_rows) != len(images):
        raise UserError(f"visible rows are given for {len(visible_rows)} of {len(images)} images.")
    for rows in visible_rows:
        if not 0 <= rows <= height:
            raise UserError(f"visible_rows={rows} must lie between 0 and the height, {height}.")
    forks_of = defaultdict(list)
    for image, fork in chosen:
        forks_of[image].append(fork)
    alike = defaultdict(list)
    for image, forks in forks_of.items():
        alike[visible_rows[image], tuple(forks)].append(image)
    return _draw_completions(model, images, alike, drawing, batch_size)


def _draw_completions(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    alike: Mapping[tuple[int, tuple[int, ...]], Sequence[int]],
    drawing: Drawing,
    batch_size: int,
) -> Iterator[tuple[list[tuple[int, int]], UInt8[np.ndarray, "b h w c"]]]:
    for (rows, all_forks), members in alike.items():
        for stream in range(0, len(all_forks), batch_size):
            forks = all_forks[stream : stream + batch_size]
            together = max(1, batch_size // len(forks))
            for first in range(0, len(members), together):
                group = members[first : first + together]
                pairs = [(image, fork) for image in group for fork in forks]
                if rows < model.spec.height:
                    yield pairs, _complete(model, images[group], group, rows, forks, drawing)
                    continue
                if drawing.progress:
                    drawing.progress(len(pairs))
                yield pairs, images[group].repeat(len(forks), axis=0)


def _complete(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    indices: Sequence[int],
    rows: int,
    forks: Sequence[int],
    drawing: Drawing,
) -> UInt8[np.ndarray, "b h w c"]:
    """Continuations `forks` of images that show the same number of rows, image by image."""
    filled = _round_up(len(images), ROW_GROUP // math.gcd(len(forks), ROW_GROUP))
    visible = torch.from_numpy(np.resize(images[:, :rows], (filled, rows, *images.shape[2:])))
    streams = [(image, fork) for image in indices for fork in forks]
    with no_gradients(model):
        prefix = model.raster.to_sequence(visible.to(model.device))
        state = initial_state(model, indices, filled, drawing)
        if rows:
            parameters, state = model.prefill(prefix.repeat(drawing.copies, 1, 1), state)
        else:
            parameters, state = model.step(None, state)
        sequence = continue_sequences(
            model,
            parameters.repeat_interleave(len(forks), dim=0),
            state.repeat(len(forks)),
            streams,
            drawing,
        )
        prefix = prefix[: len(images)].repeat_interleave(len(forks), dim=0)
        return model.raster.to_images(torch.cat([prefix, sequence], dim=1)).cpu().numpy()


def _round_up(count: int, group: int) -> int:
    return math.ceil(count / group) * group


def _check(name: str, value: int, low: int) -> None:
    if value < low:
        raise UserError(f"{name}={value} must be at least {low}.")


def _checked_batch(batch_size: int | None) -> int:
    if batch_size is None:
        return DEFAULT_BATCH
    _check("batch_size", batch_size, 1)
    return batch_size
