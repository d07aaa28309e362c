"""Where compiled code is kept between runs."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from imagegen.core.installation import PACKAGE

_SOURCES = (
    "core/compiled/*.py",
    "generation/decode/*.py",
    "attention/linear_loops.py",
    # These hold numbers that are compiled into the loops.
    "attention/delta.py",
    "heads/mixture_of_logistics.py",
)
"""What is compiled, in the package."""
_PREFIX = "compiled-"
_UNUSED = 7 * 24 * 3600
"""Seconds after which code of other sources is removed: another installation may still use it."""


def cache_folder() -> Path:
    """A folder that can be written, named after the sources of all loops and what compiles them.

    Numba looks at the file of one function only, and would use code that was compiled from earlier
    versions of the functions that it calls. It does tell processors apart, but two that write the
    same index at the same time, in a home folder that machines share, may each load what the other
    compiled.

    Raises:
        OSError: where not even a temporary folder can be made.
    """
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in PACKAGE.glob(pattern)):
        digest.update(path.read_bytes())
    name = _PREFIX + digest.hexdigest()[:16]
    for parent in _parents():
        folder = parent / name / _compiler()
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                os.utime(folder.parent)
                _remove_others(folder.parent)
                return folder
    return _of_this_process()


def _parents() -> Iterator[Path]:
    """Where to try: beside the sources, in the user's cache, in the user's temporary folder."""
    yield PACKAGE / "core" / "compiled" / "__pycache__"
    home = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # neither HOME nor an entry in the list of users
        yield (Path(home) if home else Path.home() / ".cache") / "imagegen"
    temporary = _temporary()
    if temporary is not None:
        yield temporary


def _temporary() -> Path | None:
    """A folder that later processes of this user find again; None where it may be another's.

    Everybody may write beside it, and what is in it will be executed.
    """
    user = os.getuid() if hasattr(os, "getuid") else ""  # on Windows, each user has a place
    folder = Path(tempfile.gettempdir()) / f"imagegen-{user}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return None
    if user != "" and (found.st_uid != user or stat.S_IMODE(found.st_mode) & 0o077):
        return None
    return folder


@functools.cache
def _of_this_process() -> Path:
    """A folder that is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="imagegen-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _compiler() -> str:
    """What compiles the sources and for which processor, in one word."""
    import numba

    from imagegen.core.compiled.compile import target

    compiler = (numba.__version__, target())
    return hashlib.sha256(repr(compiler).encode()).hexdigest()[:16]


def first_use(folder: Path, variant: str) -> bool:
    """Whether this variant of the loops is wanted in this folder for the first time."""
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
    """Code of other sources that nobody has used for a while is of no use any more."""
    for other in folder.parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if other != folder and time.time() - other.stat().st_mtime > _UNUSED:
                shutil.rmtree(other, ignore_errors=True)
