"""Autoregressive image models with linear attention: train, sample, complete, evaluate.

    from imagegen import Controls, complete, generate, load_checkpoint

Importing the package costs nothing: each of these is imported when it is first used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from imagegen.core.moved import FormerCommands

if TYPE_CHECKING:
    from imagegen.checkpoint.reading import load_checkpoint
    from imagegen.generation.sampling_loop import complete, generate
    from imagegen.heads.controls import Controls

__version__ = "0.1.0"
__all__ = ["Controls", "complete", "generate", "load_checkpoint"]

sys.meta_path.append(FormerCommands)

# A type checker that saw this would let every name pass.
if not TYPE_CHECKING:
    _HOMES = {
        "Controls": "imagegen.heads.controls",
        "complete": "imagegen.generation.sampling_loop",
        "generate": "imagegen.generation.sampling_loop",
        "load_checkpoint": "imagegen.checkpoint.reading",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
