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
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from imagegen.core.errors import UserError
from imagegen.core.float64 import float64_device
from imagegen.core.inference import inference
from imagegen.core.machine import limited_threads
from imagegen.generation.decode import Decoder, choose_decoder
from imagegen.heads.controls import Controls
from imagegen.model.transformer import NO_LABEL, ImageTransformer, ModelState

Progress = Callable[[float], None]

DEFAULT_BATCH = 64

# Matrix products round differently for a handful of rows than for many. Batches are filled up to
# whole groups of this many rows, so that an image does not depend on what is drawn beside it: found
# with the libraries that PyTorch uses on CPUs.
ROW_GROUP = 16


def uniforms(seed: int, image: int, stream: int, count: int) -> Float[np.ndarray, " count"]:
    """The random numbers of one image: float64 in the open interval (0, 1).

    They come from a Philox counter keyed by (seed, image), so that image i of a seed is the same
    whatever is drawn beside it; `stream` tells several completions of one image apart.
    """
    bits = np.random.Philox(key=[seed, image], counter=[0, 0, 0, stream]).random_raw(count)
    numbers: np.ndarray = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return numbers


def noise(
    model: ImageTransformer, seed: int, streams: Sequence[tuple[int, int]], first: int, rows: int
) -> Float[np.ndarray, "rows n u"]:
    """The random numbers of the steps from `first` on.

    Noise belongs to a position: a completion's does not depend on how much is visible.
    """
    length, per_step = model.raster.length, model.head.uniforms_per_step
    numbers = [uniforms(seed, image, stream, length * per_step) for image, stream in streams]
    shaped = np.stack(numbers).reshape(len(streams), length, per_step)[:, first:]
    return np.resize(shaped, (rows, *shaped.shape[1:]))


@dataclass(frozen=True)
class Drawing:
    """What all images of one call have in common.

    Attributes:
        seed: of the random numbers.
        controls: how to draw.
        labels: image i has labels[i % len(labels)]; None for no labels.
        progress: called with the number of images done since the last call.
        decoder: compiled code that draws from the model; None for PyTorch's operations.
    """

    seed: int
    controls: Controls
    labels: tuple[int, ...] | None
    progress: Progress | None
    decoder: Decoder | None = None

    @classmethod
    def of(
        cls,
        model: ImageTransformer,
        seed: int,
        controls: Controls | None,
        labels: Sequence[int] | None,
        progress: Progress | None,
        precision: str = "auto",
    ) -> Drawing:
        """What a user asks for, checked.

        Raises:
            UserError: for labels or controls that the model does not have, or a seed or precision
            that there is not.
        """
        if not 0 <= seed < 2**64:
            raise UserError(f"seed={seed} must lie between 0 and 2^64 - 1.")
        controls = controls or Controls()
        model.head.check(controls)
        if labels is not None:
            check_labels(model, labels)
        elif controls.guidance != 1:
            raise UserError(
                f"guidance={controls.guidance} needs labels to guide towards; add label=."
            )
        chosen = None if labels is None else tuple(labels)
        return cls(seed, controls, chosen, progress, choose_decoder(model, controls, precision))

    @property
    def loop(self) -> str:
        """Which code draws: images of one differ from those of another by rounding."""
        return "torch" if self.decoder is None else f"compiled, {self.decoder.precision}"

    @property
    def copies(self) -> int:
        """Rows that an image takes: two with guidance, one with and one without its label."""
        return 1 if self.controls.guidance == 1 else 2

    def labels_of(self, images: Sequence[int], rows: int) -> Int64[Tensor, " b"] | None:
        """Labels of the images, repeated to fill the rows, then those of the second half.

        They are on the CPU.
        """
        if self.labels is None:
            return None
        own = np.resize([self.labels[image % len(self.labels)] for image in images], rows)
        copies = np.full(rows * (self.copies - 1), NO_LABEL)
        return torch.from_numpy(np.concatenate([own, copies]).astype(np.int64))


def check_labels(model: ImageTransformer, labels: Sequence[int]) -> None:
    """Refuse labels that the model does not know.

    Raises:
        UserError: for those.
    """
    if model.n_classes is None:
        raise UserError(
            "this model was trained without labels, so it cannot draw a class; train one with "
            "model.conditional=true."
        )
    if not labels:
        raise UserError("labels is empty; give at least one.")
    for label in labels:
        if not NO_LABEL <= label < model.n_classes:
            raise UserError(
                f"label={label} is unknown; the model has labels 0 to {model.n_classes - 1}."
            )


def continue_sequences(
    model: ImageTransformer,
    parameters: Float[Tensor, "rows p"],
    state: ModelState,
    streams: Sequence[tuple[int, int]],
    drawing: Drawing,
) -> UInt8[Tensor, "b n s"]:
    """Draw the rest of the sequences, from the distribution of their next step on.

    There may be more rows than streams of random numbers; the rows beyond are dropped. With
    guidance, the second half of the rows is the first without labels.

    Args:
        model: on any device, which is that of all tensors here.
        parameters: the distribution of the next step.
        state: after that step.
        streams: of random numbers, one for each sequence to draw: image and stream.
        drawing: see `Drawing`.
    """
    first = state.position - 1
    steps = model.raster.length - first
    rows = parameters.shape[0] // drawing.copies
    uniforms = noise(model, drawing.seed, streams, first, rows)
    if drawing.decoder is not None:
        return _continue_compiled(drawing.decoder, parameters, state, uniforms, streams, drawing)
    numbers = torch.from_numpy(uniforms).to(float64_device(parameters.device))
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
    """`continue_sequences` by compiled code, which needs no rows beyond those that are kept.

    The decoder takes and gives arrays; what comes and goes here is on the model's device.
    """
    first, count, recent = state.position - 1, len(streams), state.recent
    values = recent.shape[-1]
    sequence = np.zeros((count, first + uniforms.shape[1], values), dtype=np.uint8)
    known = min(first, recent.shape[1])
    if known:
        sequence[:, first - known : first] = recent[:count, -known:].cpu().numpy()
    decoder.draw(state, parameters, sequence, uniforms, drawing.controls, drawing.progress)
    return torch.from_numpy(sequence[:, first:]).to(parameters.device)


def initial_state(
    model: ImageTransformer, images: Sequence[int], rows: int, drawing: Drawing
) -> ModelState:
    """The state before the first step, of `rows` rows (twice as many with guidance)."""
    labels = drawing.labels_of(images, rows)
    on_device = None if labels is None else labels.to(model.device)
    return model.initial_state(rows * drawing.copies, on_device)


@contextmanager
def no_gradients(model: ImageTransformer) -> Iterator[None]:
    """Without gradients, dropout or idle threads, leaving the model as it was."""
    with inference(model), limited_threads():
        yield


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
            `imagegen.generation.decode.choose_decoder`.
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
