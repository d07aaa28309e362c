"""One array of all images of a folder, converted once and then mapped into memory.

The file is what `np.save` writes, followed by digests: `image_digests` of the rows (int64 "n",
little-endian), then those of the files' contents (uint64 "n"), in the order of their paths.
"""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int64, UInt8, UInt64

from imagegen.core.errors import UserError
from imagegen.core.machine import usable_cpus
from imagegen.core.progress import image_progress
from imagegen.data.base import image_digests

T = TypeVar("T")

BLOCK = 512  # images converted between two writes
PART = 8  # of these, in one thread at a time


class Cache(NamedTuple):
    """What the file holds; `images` is a read-only memory map."""

    images: UInt8[np.ndarray, "n h w c"]
    digests: Int64[np.ndarray, " n"]
    contents: UInt64[np.ndarray, " n"]


def open_cache(path: Path, shape: tuple[int, int, int, int]) -> Cache | None:
    """The cached images "n h w c"; None if the file is missing or incomplete."""
    # A header that is not the very one that is written here is not parsed: a damaged one may be
    # anything. `numpy.load` with `mmap_mode="r"` would parse it, and says nothing of the digests.
    header = _header(shape)
    end = len(header) + math.prod(shape)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(header)) != header or size != end + 16 * shape[0]:
                return None
            images = np.memmap(file, np.uint8, "r", len(header), shape)
            file.seek(end)
            digests, contents = file.read(8 * shape[0]), file.read(8 * shape[0])
        return Cache(
            images,
            np.frombuffer(digests, "<i8").astype(np.int64),
            np.frombuffer(contents, "<u8").astype(np.uint64),
        )
    except (OSError, ValueError):
        return None


def build_cache(
    path: Path,
    files: Sequence[Path],
    shape: tuple[int, int, int],
    convert: Callable[[Path], UInt8[np.ndarray, "h w c"]],
    contents: UInt64[np.ndarray, " n"],
) -> None:
    """Convert `files`, in order, into one `.npy` file of uint8 "n h w c", and add the digests.

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
                _write(part, files, shape, convert, contents)
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
    contents: UInt64[np.ndarray, " n"],
) -> None:
    # Written in order rather than into a memory map: a full disk is then an error, not a crash.
    part.write(_header((len(files), *shape)))
    digests = []
    for block in in_blocks("converting images", files, convert):
        images = np.ascontiguousarray(np.stack(block))
        part.write(images.data)
        digests.append(image_digests(images))
    part.write(np.concatenate(digests).astype("<i8").tobytes())
    part.write(contents.astype("<u8").tobytes())


def _header(shape: tuple[int, int, int, int]) -> bytes:
    header = io.BytesIO()
    described = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


def in_blocks(
    description: str, files: Sequence[Path], work: Callable[[Path], T]
) -> Iterator[list[T]]:
    """`work(file)` of each file, in order, done in threads and handed over in blocks."""
    # Pillow and hashlib work outside the interpreter's lock, so threads are enough.
    workers = min(16, usable_cpus())
    with (
        image_progress(description, len(files)) as advance,
        ThreadPoolExecutor(workers) as pool,
    ):
        for start in range(0, len(files), BLOCK):
            block = []
            parts = [
                files[first : first + PART]
                for first in range(start, min(start + BLOCK, len(files)), PART)
            ]
            for done in pool.map(lambda part: [work(file) for file in part], parts):
                block.extend(done)
                advance(len(done))
            yield block
