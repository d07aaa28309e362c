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
from jaxtyping import Float, UInt8
from torch import Tensor

from imagegen.heads.controls import Controls

if TYPE_CHECKING:
    from imagegen.model import ImageTransformer, ModelState
else:  # Annotations are checked in tests; the model imports nothing from here.
    ImageTransformer = ModelState = Any


class Decoder(ABC):
    """Draws from one model."""

    @abstractmethod
    def draw(
        self,
        state: ModelState,
        parameters: Float[Tensor, "rows p"],
        sequence: UInt8[np.ndarray, "b n s"],
        noise: Float[np.ndarray, "rows m u"],
        controls: Controls,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Draw the steps from that of `parameters` to the last one.

        Args:
            state: after the step of `parameters`, from `model.step` or `model.prefill`; it may have
                more rows than the sequence, as may `parameters` and `noise`.
            parameters: the distribution of the first step to draw.
            sequence: levels of all steps; those from there on are written.
            noise: uniform numbers of the steps from there on, float64.
            controls: how to draw, neither greedy nor guided and with all of the distribution.
            progress: called with the (fractional) number of rows done since the last call, from
                several threads.
        """


# Shorter sequences are drawn in moments anyway, and loading compiled code takes one too. The number
# of images does not matter, so that an image does not depend on it.
SHORTEST = 256


PRECISIONS = {"auto": 16, "32": 32, "int16": 16, "int8": 8}
"""Bits of the weights in the compiled loop."""


def choose_decoder(
    model: ImageTransformer, controls: Controls, precision: str = "auto"
) -> Decoder | None:
    """A compiled decoder of the model as it is now; None where PyTorch's operations have to do.

    Which it is depends on the model, the machine and the arguments alone. The reason is told once.

    Args:
        model: is copied.
        controls: how to draw.
        precision: of the weights: `32` for float32; `int16` or `int8` for whole numbers, see
            `imagegen.decode.integer`; `auto` takes int16, which changes bits/dim by less than
            0.001, where the processor has instructions for it.
    """
    if model.raster.length < SHORTEST:
        return None
    if controls.greedy or controls.top_p != 1 or controls.guidance != 1:
        return None
    try:
        fused = _fused()
    except Exception as error:  # Numba missing, too old, or at odds with another package
        _say(f"without compiled loops: {error}")
        return None
    reason = fused.why_not(model)
    if reason is not None:
        _say(f"without compiled loops: {reason}")
        return None
    from imagegen.decode.integer import is_supported

    bits = PRECISIONS[precision]
    if bits < 32 and not is_supported():
        if precision != "auto":
            _say(f"in float32, for the processor has no instructions for {precision}")
        bits = 32
    decoder: Decoder = fused.FusedDecoder(model, bits)
    return decoder


@functools.cache
def _fused() -> Any:
    """The module of the compiled loops, its code read from where it is kept."""
    from imagegen.decode.cache import cache_folder, is_compiled, numba_cache

    folder = cache_folder()
    with numba_cache(folder):
        from imagegen.decode import fused
    if not is_compiled(folder):
        _say("for the first time: compiling the loop for this machine takes seconds, once")
    return fused


@functools.cache
def _say(text: str) -> None:
    print(f"drawing {text}", file=sys.stderr, flush=True)
