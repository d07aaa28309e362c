"""One array of all images of a folder, converted once and then mapped into memory."""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import UInt8

from imagegen.errors import UserError
from imagegen.machine import usable_cpus
from imagegen.progress import image_progress

BLOCK = 512  # images converted between two writes
PART = 8  # of these, in one thread at a time


def open_cache(path: Path, shape: tuple[int, int, int, int]) -> UInt8[np.ndarray, "n h w c"] | None:
    """The cached array as a read-only memory map; None where there is none, or not a whole one."""
    # A header that is not the very one that is written here is not parsed: a damaged one may be
    # anything.
    header = _header(shape)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(header)) != header or size != len(header) + math.prod(shape):
                return None
        return np.memmap(path, np.uint8, "r", len(header), shape)
    except (OSError, ValueError):
        return None


def build_cache(
    path: Path,
    files: Sequence[Path],
    shape: tuple[int, int, int],
    convert: Callable[[Path], UInt8[np.ndarray, "h w c"]],
) -> None:
    """Convert `files`, in order, into one `.npy` file of uint8 "n h w c".

    The file appears under its name when it is whole, so two processes may build at once: each
    writes its own, and the last to finish stays.

    Raises:
        UserError: where `convert` raises one, or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            prefix=".building-", suffix=".npy", dir=path.parent, delete=False
        ) as part:
            try:
                _write(part, files, shape, convert)
                part.flush()
                os.fsync(part.fileno())
                part.close()
                os.chmod(part.name, 0o644)  # temporary files are private; caches are not
                os.replace(part.name, path)
            finally:
                Path(part.name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"the converted images cannot be written to {path.parent} "
            f"({error.strerror or error}); set dataset.cache to a folder that can "
            "be written and has enough space."
        ) from error


def _write(
    part: IO[bytes],
    files: Sequence[Path],
    shape: tuple[int, int, int],
    convert: Callable[[Path], UInt8[np.ndarray, "h w c"]],
) -> None:
    # Written in order rather than into a memory map: a full disk is then an error, not a crash.
    part.write(_header((len(files), *shape)))
    for block in _converted(files, convert):
        part.write(np.ascontiguousarray(np.stack(block)).data)


def _header(shape: tuple[int, int, int, int]) -> bytes:
    header = io.BytesIO()
    described = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


def _converted(
    files: Sequence[Path], convert: Callable[[Path], UInt8[np.ndarray, "h w c"]]
) -> Iterator[list[UInt8[np.ndarray, "h w c"]]]:
    # Pillow decodes and resizes outside the interpreter's lock, so threads are enough.
    workers = min(16, usable_cpus())
    with (
        image_progress("converting images", len(files)) as advance,
        ThreadPoolExecutor(workers) as pool,
    ):
        for start in range(0, len(files), BLOCK):
            block = []
            parts = [
                files[first : first + PART]
                for first in range(start, min(start + BLOCK, len(files)), PART)
            ]
            for images in pool.map(lambda part: [convert(file) for file in part], parts):
                block.extend(images)
                advance(len(images))
            yield block
