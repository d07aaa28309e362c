"""What Numba compiles for the machine at hand: how, from which pieces, and where it is kept."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import ModuleType


@functools.cache
def load(module: str) -> ModuleType:
    """A module of compiled functions, whose code is read from where it is kept.

    Raises:
        Exception: of any kind, where Numba is missing, too old, or at odds with another package.
    """
    from imagegen.core.compiled.cache import numba_cache

    with numba_cache(folder()):
        return importlib.import_module(module)


@functools.cache
def folder() -> Path:
    """Where this process keeps compiled code."""
    from imagegen.core.compiled.cache import cache_folder

    return cache_folder()
