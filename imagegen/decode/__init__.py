"""Fast generation: the recurrent step of a model, compiled for the machine at hand.

Every model can be drawn from with PyTorch's own operations; where a compiled loop knows the model,
it is taken instead, and draws from the same distribution up to rounding.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagegen.heads.controls import Controls

if TYPE_CHECKING:
    from imagegen.decode.fused import FusedDecoder
    from imagegen.model import ImageTransformer
else:  # Annotations are checked in tests; Numba is not to be imported for them.
    FusedDecoder = ImageTransformer = Any

# Shorter sequences are drawn in moments anyway, and loading compiled code takes one too. It does not
# depend on how many images are asked for, so that an image does not either.
SHORTEST = 256


def choose_decoder(model: ImageTransformer, controls: Controls) -> FusedDecoder | None:
    """A compiled decoder of the model as it is now; None where PyTorch's operations have to do.

    Which it is depends on the model and the controls alone. The reason is told once.
    """
    if model.raster.length < SHORTEST:
        return None
    if controls.greedy or controls.top_p != 1 or controls.guidance != 1:
        return None
    try:
        from imagegen.decode.fused import FusedDecoder, why_not
    except Exception as error:  # Numba missing, too old, or without a folder for its cache
        _say(f"without compiled loops: {error}")
        return None
    reason = why_not(model)
    if reason is not None:
        _say(f"without compiled loops: {reason}")
        return None
    if not list((Path(__file__).parent / "__pycache__").glob("linear.run-*.nbi")):
        _say("for the first time: compiling the loop for this machine takes seconds, once")
    return FusedDecoder(model)


@functools.cache
def _say(text: str) -> None:
    print(f"drawing {text}", file=sys.stderr, flush=True)
