"""Where compiled code is kept between runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_SOURCES = Path(__file__).parent
_PREFIX = "compiled-"


def cache_folder() -> Path:
    """A folder that can be written, named after the sources of all loops.

    Numba asks for the file of a function alone and would go on with code that was compiled from
    earlier versions of the functions that it calls.
    """
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.glob("*.py")):
        digest.update(path.read_bytes())
    name = _PREFIX + digest.hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for parent in (_SOURCES / "__pycache__", Path(home) / "imagegen"):
        folder = parent / name
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                _remove_others(folder)
                return folder
    return Path(tempfile.mkdtemp(prefix="imagegen-"))


def first_use(folder: Path, variant: str) -> bool:
    """Whether this variant of the loops is asked for in this folder for the first time."""
    mark = folder / f"{variant}.used"
    if mark.exists():
        return False
    with suppress(OSError):
        mark.touch()
    return True


@contextmanager
def numba_cache(folder: Path) -> Iterator[None]:
    """Functions that are decorated meanwhile keep their code in the folder."""
    import numba

    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


def _remove_others(folder: Path) -> None:
    """Code of other versions of the sources is of no use any more."""
    for other in folder.parent.glob(f"{_PREFIX}*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
