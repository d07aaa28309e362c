"""How images are drawn, whichever they are: their random numbers, their labels, the controls.

Axes: `b` batch, `n` position, `u` uniform numbers a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from imagegen.decode import Decoder, choose_decoder
from imagegen.errors import UserError
from imagegen.float64 import float64_device
from imagegen.heads.controls import Controls
from imagegen.machine import limited_threads
from imagegen.model import NO_LABEL, ImageTransformer, ModelState

Progress = Callable[[float], None]


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

    def labels_of(self, images: Sequence[int], rows: int) -> Int64[Tensor, "b"] | None:
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
            "this model was trained without labels, so none can be asked for; train one with "
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
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), limited_threads():
            yield
    finally:
        model.train(training)
