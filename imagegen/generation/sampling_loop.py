"""The sampling loop: images drawn and completed in batches from the recurrent state.

Image i of a seed is drawn from the same random numbers whatever is drawn beside it, on every
device. On the CPU its levels are then the same too, bit for bit. On a GPU, libraries choose their
algorithms by the number of rows, in ways of their own: where two of them round differently, a level
at the edge of a random number may fall otherwise, and with it all that follow. `imagegen verify`
measures it.

Axes: `b` batch, `n` image or position, `k` completion, `u` uniform numbers per step, `h w c`
height, width, channel.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from imagegen.core.errors import UserError
from imagegen.core.float64 import float64_device
from imagegen.data.regions import as_visible
from imagegen.generation.decode import Decoder
from imagegen.generation.particles import PARTICLES, Report, draw_particles
from imagegen.generation.random_numbers import noise
from imagegen.generation.sampling_request import (
    ROW_GROUP,
    SamplingRequest,
    first_pixels,
    initial_state,
    kept_steps,
    no_gradients,
)
from imagegen.generation.turned import Turned, needs_particles
from imagegen.generation.watching import Growth, Progress, Watch
from imagegen.heads.controls import Controls
from imagegen.model.transformer import ImageTransformer, ModelState

DEFAULT_BATCH = 64


def continue_sequences(
    model: ImageTransformer,
    parameters: Float[Tensor, "rows p"],
    state: ModelState,
    streams: Sequence[tuple[int, int]],
    request: SamplingRequest,
    prefix: UInt8[Tensor, "b first s"] | None = None,
    order: Bool[Tensor, "b h w"] | None = None,
) -> UInt8[Tensor, "b n s"]:
    """Draw the rest of the sequences, from the distribution of their next step on.

    There may be more rows than streams of random numbers; the rows beyond are dropped. With
    guidance, the second half of the rows is the first without labels.

    Args:
        model: on any device, which is that of all tensors here.
        parameters: the distribution of the next step.
        state: after that step.
        streams: of random numbers, one for each sequence to draw: image and stream.
        request: see `SamplingRequest`.
        prefix: what comes before, of each sequence to draw, for those who watch.
        order: see `first_pixels`; of each sequence to draw.
    """
    first = state.position - 1
    steps = model.raster.length - first
    rows = parameters.shape[0] // request.copies
    uniforms = noise(model, request.seed, streams, first, rows)
    followed = request.progress is not None or request.watch is not None

    def follow(drawn: Callable[[], UInt8[np.ndarray, "b m s"]]) -> Growth | None:
        told = (request.progress, request.watch, streams, first, model.raster)
        return Growth(*told, drawn, prefix, order) if followed else None

    if request.decoder is not None:
        controls = request.controls
        return _continue_compiled(
            request.decoder, parameters, state, uniforms, len(streams), controls, follow
        )
    numbers = torch.from_numpy(uniforms).to(float64_device(parameters.device))
    sequence = torch.empty(
        rows, steps, model.raster.values_per_step, dtype=torch.uint8, device=parameters.device
    )
    growth = follow(lambda: sequence[: len(streams)].cpu().numpy())
    for step in range(steps):
        if step:
            values = sequence[:, step - 1].repeat(request.copies, 1)
            parameters, state = model.step(values, state)
        sequence[:, step] = model.head.draw_levels(parameters, numbers[:, step], request.controls)
        if growth:
            growth(slice(None), first + step + 1)
    return sequence[: len(streams)]


def _continue_compiled(
    decoder: Decoder,
    parameters: Float[Tensor, "rows p"],
    state: ModelState,
    uniforms: Float[np.ndarray, "kept n u"],
    count: int,
    controls: Controls,
    follow: Callable[[Callable[[], UInt8[np.ndarray, "b m s"]]], Growth | None],
) -> UInt8[Tensor, "b n s"]:
    """`continue_sequences` by compiled code, which needs no rows beyond those that are kept.

    The decoder takes and gives arrays; what comes and goes here is on the model's device.
    """
    first, recent = state.position - 1, state.recent
    values = recent.shape[-1]
    sequence = np.zeros((count, first + uniforms.shape[1], values), dtype=np.uint8)
    known = min(first, recent.shape[1])
    if known:
        sequence[:, first - known : first] = recent[:count, -known:].cpu().numpy()
    growth = follow(lambda: sequence[:, first:])
    decoder.draw(state, parameters, sequence, uniforms, controls, growth)
    return torch.from_numpy(sequence[:, first:]).to(parameters.device)


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
    watch: Watch | None = None,
) -> Iterator[UInt8[np.ndarray, "b h w c"]]:
    """Draw images `start` to `start + n - 1` of `seed`.

    Args:
        model: draws on its device; its training mode is left as it was.
        n: number of images, at least 1.
        seed: 0 to 2^64 - 1. Image i of a seed has the same random numbers for every n, batch size
            and start; on the CPU it is the same image, on other devices but for their rounding. On
            processors with AMX, `precision=auto` rounds otherwise from some batch size on.
        controls: temperatures, top_p and guidance; by default, what the model has learned is drawn.
        labels: image i is of class labels[i % len(labels)], 0 to n_classes - 1, or -1 for none;
            without them no image has a label.
        batch_size: images drawn together; 64 by default.
        precision: of the weights where a compiled loop draws: auto, 32, bf16, int16 or int8; see
            `imagegen.generation.decode.choose_decoder`.
        progress: called with the (fractional) number of images done since the last call.
        watch: called with a `Snapshot` of the images that are being drawn, some times a second and
            in at most a tenth of the time. What it or `progress` raises ends the drawing and comes
            through. Both may be called from threads of the drawing.

    Yields:
        Levels of finished images, at most batch_size at a time, in order.

    Raises:
        UserError: for numbers out of their range, and for labels or controls that the model does
            not have.
    """
    _check("n", n, 1)
    _check("start", start, 0)
    request = SamplingRequest.of(
        model, seed, controls, labels, progress, precision, watch, _checked_batch(batch_size)
    )
    return draw_images(model, range(start, start + n), request, batch_size)


def draw_images(
    model: ImageTransformer,
    chosen: Sequence[int],
    request: SamplingRequest,
    batch_size: int | None = None,
) -> Iterator[UInt8[np.ndarray, "b h w c"]]:
    """`generate` for any choice of the images of a seed, drawn in the order given."""
    return _draw(model, chosen, request, _checked_batch(batch_size))


def _draw(
    model: ImageTransformer, chosen: Sequence[int], request: SamplingRequest, batch_size: int
) -> Iterator[UInt8[np.ndarray, "b h w c"]]:
    for first in range(0, len(chosen), batch_size):
        streams = [(image, 0) for image in chosen[first : first + batch_size]]
        with no_gradients(model):
            rows = _round_up(len(streams), ROW_GROUP)
            state = initial_state(model, [image for image, _ in streams], rows, request)
            parameters, state = model.step(None, state)
            sequence = continue_sequences(model, parameters, state, streams, request)
            images = model.raster.to_images(sequence).cpu().numpy()
        yield images


def complete(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    visible: Bool[np.ndarray, "n h w"] | Sequence[int],
    completions: int,
    *,
    seed: int = 0,
    controls: Controls | None = None,
    labels: Sequence[int] | None = None,
    batch_size: int | None = None,
    precision: str = "auto",
    progress: Progress | None = None,
    particles: int = PARTICLES,
    report: Callable[[int, Report], None] | None = None,
    watch: Watch | None = None,
) -> UInt8[np.ndarray, "n k h w c"]:
    """Draw several completions of the visible part of each image, which is kept bit for bit.

    A model that knows several orientations completes each image in the one in which most of what is
    visible comes first. Visible pixels that come first in the order of the model go through its
    parallel form once; the state behind them is then forked. Where others follow those that are
    drawn, particles are drawn and weighed; see `imagegen.generation.particles`.

    Args:
        model: draws on its device; its training mode is left as it was.
        images: levels; those of pixels that are not visible do not matter.
        visible: the pixels to keep, or for each image the number of its first rows to keep, 0 to h.
        completions: `k` of each image, at least 1. Completion j of image i has the same random
            numbers for every number of images and completions; see `generate` for where it is the
            same image.
        seed, controls, labels, batch_size, precision: as in `generate`.
        progress: called with the (fractional) number of completions done since the last call.
        particles: of each image that needs them, at least 1.
        report: called with the index of such an image and what became of its particles.
        watch: as in `generate`; of such images it sees the particles that would be chosen by then.

    Raises:
        UserError: as `generate`, and for visible parts of another number or size.
    """
    _check("completions", completions, 1)
    chosen = [(image, fork) for image in range(len(images)) for fork in range(completions)]
    request = SamplingRequest.of(
        model, seed, controls, labels, progress, precision, watch, _checked_batch(batch_size)
    )
    result = np.repeat(images[:, None], completions, axis=1)
    kept = as_visible(visible, *images.shape[:3])
    pieces = draw_completions(model, images, kept, chosen, request, batch_size, particles, report)
    for pairs, drawn in pieces:
        result[tuple(zip(*pairs, strict=True))] = drawn
    return result


def draw_completions(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    visible: Bool[np.ndarray, "n h w"],
    chosen: Sequence[tuple[int, int]],
    request: SamplingRequest,
    batch_size: int | None = None,
    particles: int = PARTICLES,
    report: Callable[[int, Report], None] | None = None,
) -> Iterator[tuple[list[tuple[int, int]], UInt8[np.ndarray, "b h w c"]]]:
    """`complete` for any choice of (image, completion), as they are finished.

    Yields:
        Which they are and their levels, at most batch_size at a time, or all of an image that needs
        particles; those of images of which as much comes first, and that lack the same completions,
        come together.
    """
    batch_size = _checked_batch(batch_size)
    _check("particles", particles, 1)
    given = Turned.of(model, images, visible)
    if request.watch is not None:
        request = replace(request, watch=given.watched(request.watch))
    forks_of = defaultdict(list)
    for image, fork in chosen:
        forks_of[image].append(fork)
    alike = defaultdict(list)
    for image, forks in forks_of.items():
        kept = kept_steps(model, given.visible[image])
        if needs_particles(model, kept):
            whole, orientation = given.images[image], int(given.orientation[image])
            drawn, told = draw_particles(
                model, whole, kept, image, forks, request, particles, orientation
            )
            if report is not None:
                report(image, told)
            pairs = [(image, fork) for fork in forks]
            yield pairs, given.back(drawn, pairs)
        else:
            # All that is kept comes before all that is not.
            alike[int(kept.sum()), tuple(forks)].append(image)
    for pairs, drawn in _draw_completions(model, given, alike, request, batch_size):
        yield pairs, given.back(drawn, pairs)


def _draw_completions(
    model: ImageTransformer,
    given: Turned,
    alike: Mapping[tuple[int, tuple[int, ...]], Sequence[int]],
    request: SamplingRequest,
    batch_size: int,
) -> Iterator[tuple[list[tuple[int, int]], UInt8[np.ndarray, "b h w c"]]]:
    for (first, all_forks), members in alike.items():
        for stream in range(0, len(all_forks), batch_size):
            forks = all_forks[stream : stream + batch_size]
            together = max(1, batch_size // len(forks))
            for start in range(0, len(members), together):
                group = members[start : start + together]
                pairs = [(image, fork) for image in group for fork in forks]
                if first < model.raster.length:
                    yield pairs, _complete(model, given, group, first, forks, request)
                    continue
                if request.progress:
                    request.progress(len(pairs))
                yield pairs, given.images[group].repeat(len(forks), axis=0)


def _complete(
    model: ImageTransformer,
    given: Turned,
    indices: Sequence[int],
    first: int,
    forks: Sequence[int],
    request: SamplingRequest,
) -> UInt8[np.ndarray, "b h w c"]:
    """Completions `forks`, image by image, of images that keep as many first steps.

    They are turned as the images are.
    """
    images, visible, orientation = (
        part[indices] for part in (given.images, given.visible, given.orientation)
    )
    filled = _round_up(len(images), ROW_GROUP // math.gcd(len(forks), ROW_GROUP))
    whole = torch.from_numpy(np.resize(images, (filled, *images.shape[1:]))).to(model.device)
    order = first_pixels(model, np.resize(visible, (filled, *visible.shape[1:])))
    streams = [(image, fork) for image in indices for fork in forks]
    with no_gradients(model):
        prefix = model.raster.to_sequence(whole, order)[:, :first]
        state = initial_state(model, indices, filled, request, order, orientation)
        if first:
            parameters, state = model.prefill(prefix.repeat(request.copies, 1, 1), state)
        else:
            parameters, state = model.step(None, state)
        prefix = prefix[: len(images)].repeat_interleave(len(forks), dim=0)
        if order is not None:
            order = order[: len(images)].repeat_interleave(len(forks), dim=0)
        parameters = parameters.repeat_interleave(len(forks), dim=0)
        state = state.repeat(len(forks))
        sequence = continue_sequences(model, parameters, state, streams, request, prefix, order)
        sequence = torch.cat([prefix, sequence], dim=1)
        return model.raster.to_images(sequence, order).cpu().numpy()


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
