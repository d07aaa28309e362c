"""Fast generation: the recurrent step of a model, compiled for the machine at hand.

Every model can be drawn from with PyTorch's own operations; where a compiled loop knows the model,
it is taken instead, and draws from the same distribution up to rounding.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, UInt8
from torch import Tensor

from imagegen.core.compiled import folder, load
from imagegen.core.errors import UserError
from imagegen.core.machine import Choice, bf16_drawing, limited_threads
from imagegen.core.values import choice
from imagegen.generation.sample_options import PRECISIONS
from imagegen.heads.categorical import Categorical
from imagegen.heads.controls import Controls

if TYPE_CHECKING:
    from imagegen.model.transformer import ImageTransformer, ModelState
else:  # Annotations are checked in tests; the model imports nothing from here.
    ImageTransformer = ModelState = Any


Reached = Callable[[slice, int], None]

PIECE = 0.02
"""Seconds between two calls of `Reached`, about."""


def next_piece(steps: int, seconds: float, longest: int) -> int:
    """How many steps to do until the next call, after `steps` that took `seconds`."""
    return max(1, min(longest, 2 * steps, int(steps * PIECE / max(seconds, 1e-9))))


class Particles(ABC):
    """Sequences of one image that are drawn and scored side by side, and may replace each other.

    The steps are gone through in order, each once, from the first one that is not known.

    Attributes:
        sequence: levels of all steps; those that are drawn are written.
    """

    sequence: UInt8[np.ndarray, "b n s"]

    @abstractmethod
    def draw(self, start: int, stop: int) -> None:
        """Draw the values of steps `start` to `stop` - 1, at most a row of the image."""

    @abstractmethod
    def score(self, start: int, stop: int) -> Float64[np.ndarray, " b"]:
        """Natural log-probability of the values of these steps, as many at most, of each row."""

    @abstractmethod
    def select(self, rows: Int64[np.ndarray, " b"]) -> None:
        """Let these rows take the place of all."""


class Decoder(ABC):
    """Draws from one model.

    Tensors are on the model's device; arrays are, as ever, on the CPU.

    Attributes:
        variant: what the compiled code depends on, in one word.
        precision: of the weights: 32, bf16, int16 or int8.
        loop_seconds: what the last call of `draw` spent in its loop, without copying states; None
            where that is not told apart.
    """

    variant: str
    precision: str
    loop_seconds: float | None = None

    @abstractmethod
    def draw(
        self,
        state: ModelState,
        parameters: Float[Tensor, "rows p"],
        sequence: UInt8[np.ndarray, "b n s"],
        noise: Float[np.ndarray, "kept m u"],
        controls: Controls,
        reached: Reached | None = None,
    ) -> None:
        """Draw the steps from that of `parameters` to the last one.

        Args:
            state: after the step of `parameters`, from `model.step` or `model.prefill`; it may have
                more rows than the sequence, as may `parameters` and `noise`.
            parameters: the distribution of the first step to draw.
            sequence: levels of all steps; those from there on are written.
            noise: uniform numbers of the steps from there on, float64.
            controls: how to draw, not greedy and with all of the distribution; with guidance, the
                second half of the rows of state and parameters is the first without labels.
            reached: called some dozens of times a second, from several threads, with rows and the
                step before which all of their values are written. What it raises ends the drawing.
        """

    def particles(
        self,
        state: ModelState,
        parameters: Float[Tensor, "b p"],
        sequence: UInt8[np.ndarray, "b n s"],
        noise: Float[np.ndarray, "b m u"],
        controls: Controls,
    ) -> Particles | None:
        """Rows to draw and to score, of arguments as for `draw`; None where PyTorch has to do."""
        return None

    @abstractmethod
    def parameters(
        self,
        sequence: UInt8[np.ndarray, "b n s"],
        labels: Int64[np.ndarray, " b"] | None = None,
    ) -> Float[np.ndarray, "b n p"]:
        """The distributions of all steps of known sequences, in the decoder's own arithmetic.

        Args:
            sequence: levels.
            labels: see `ModelState`; none by default.
        """


# Shorter sequences are drawn in moments anyway, and loading compiled code takes one too. The number
# of images does not matter, so that an image does not depend on it; that of a batch only with AMX.
SHORTEST = 256


BITS = {"32": 32, "int16": 16, "int8": 8}
"""Of the weights that the compiled loop multiplies itself, by precision."""


def choose_decoder(
    model: ImageTransformer, controls: Controls, precision: str = "auto", batch_size: int = 1
) -> Decoder | None:
    """A compiled decoder of the model as it is now; None where PyTorch's operations have to do.

    Which it is depends on the model, the machine and the arguments alone. The reason is told once.

    Args:
        model: is copied.
        controls: how to draw.
        precision: of the weights: `32` for float32; `bf16` for blocks of rows, see
            `imagegen.generation.decode.bf16`; `int16` or `int8` for whole numbers, see
            `imagegen.generation.decode.integer`; `auto` takes bf16 where
            `imagegen.core.machine.bf16_drawing` says so, else int16 where the processor has
            instructions for it, which has changed bits/dim by less than 0.0001 where it was
            measured, else float32.
        batch_size: images that are to be drawn together; decides for `auto`.

    Raises:
        UserError: for another precision.
    """
    choice(precision, "precision", PRECISIONS)
    if model.raster.length < SHORTEST:
        return None
    on_cpu = model.device.type == "cpu"
    if controls.top_p != 1 and not on_cpu:
        say("drawing without compiled loops, which know top_p on a CPU alone")
        return None
    if not (on_cpu and isinstance(model.head, Categorical)):
        for name, asked in (
            ("temperature=0", controls.greedy),
            ("guidance", controls.guidance != 1),
        ):
            if asked:
                say(
                    f"drawing without compiled loops, which know {name} for head=categorical on a "
                    "CPU alone"
                )
                return None
    with limited_threads():
        decoder = _decoder(model, precision, batch_size)
    if isinstance(decoder, Decoder):
        return decoder
    say(f"drawing without compiled loops: {decoder}")
    return None


def parameters_as_drawn(
    model: ImageTransformer,
    sequence: UInt8[Tensor, "b n s"],
    labels: Int64[Tensor, " b"] | None,
    precision: str,
) -> Float[Tensor, "b n p"]:
    """`ImageTransformer.parameters_of`, step by step in the arithmetic of the compiled loop.

    All tensors are on the model's device.

    Raises:
        UserError: for an unknown precision, or a model that has no compiled loop.
    """
    choice(precision, "precision", PRECISIONS)
    decoder = _decoder(model, precision)
    if not isinstance(decoder, Decoder):
        raise UserError(
            f"precision={precision} needs compiled loops, which are missing: {decoder}; leave "
            "precision out."
        )
    known = None if labels is None else labels.cpu().numpy()
    found = torch.from_numpy(decoder.parameters(sequence.cpu().numpy(), known))
    return found.to(model.device)


def _decoder(model: ImageTransformer, precision: str, batch_size: int = 1) -> Decoder | str:
    """A compiled decoder of the model, or the reason why it cannot be had."""
    if model.device.type == "cuda":
        return _on_gpu(model, precision)
    try:
        fused = _fused()
    except Exception as error:  # Numba missing, too old, or at odds with another package
        return str(error)
    from imagegen.core.compiled.cache import first_use
    from imagegen.generation.decode.prepare import why_not

    reason = why_not(model)
    if reason is not None:
        return reason

    bits = _bits(precision, batch_size)
    if isinstance(bits, str):
        return bits
    decoder: Decoder = fused.FusedDecoder(model, bits)
    if first_use(folder(), decoder.variant):
        say("compiling the drawing loop for this machine takes seconds, once")
    first_step = np.zeros((1, 1, model.raster.values_per_step), dtype=np.uint8)
    try:
        with torch.no_grad():
            decoder.parameters(first_step)  # compiles, or loads what was compiled
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        return f"compiling them into {folder()} failed ({type(error).__name__}: {reason})"
    return decoder


def _bits(precision: str, batch_size: int) -> int | str:
    """Of the weights, as `matrix.Matrix` has them, or why there are no products of bfloat16."""
    from imagegen.generation.decode.bf16 import why_not
    from imagegen.generation.decode.integer import is_supported
    from imagegen.generation.decode.matrix import BF16

    if precision in BITS:
        return BITS[precision]
    if precision == "bf16" or bf16_drawing(batch_size).value == "yes":
        reason = why_not()
        if reason is None:
            return BF16
        if precision == "bf16":
            return reason
        say(f"computing without bfloat16: {reason}")
    return 16 if is_supported() else 32


def machine_choice(device: torch.device) -> Choice:
    """What draws from most models on this device, and why; for `imagegen.core.machine`."""
    if device.type == "cuda":
        return Choice("one CUDA graph per step", "float32 on a GPU")
    if device.type != "cpu":
        return Choice("PyTorch's operations", f"there is no compiled loop for {device.type}")
    try:
        _fused()
    except Exception as error:  # as in `_decoder`
        return Choice("PyTorch's operations", str(error))
    from imagegen.core.compiled.compile import target
    from imagegen.generation.decode.integer import is_supported

    compiled = target()
    sets = ", ".join(compiled.instruction_sets) or (
        "neither FMA nor AVX2" if compiled.is_x86 else compiled.processor
    )
    precision = "int16" if is_supported() else "float32"
    return Choice(f"compiled loop, {precision}", f"compiled for {sets}")


def _on_gpu(model: ImageTransformer, precision: str) -> Decoder | str:
    from imagegen.generation.decode.graph import GraphDecoder, why_not

    if precision not in ("auto", "32"):
        say(f"computing in float32, because {precision} is for CPUs")
    reason = why_not(model)
    return GraphDecoder(model) if reason is None else reason


def _fused() -> Any:
    """The module of the compiled loops."""
    return load("imagegen.generation.decode.fused")


@functools.cache
def say(text: str) -> None:
    """Say once how images are drawn, or scored as they are drawn."""
    print(text, file=sys.stderr, flush=True)
