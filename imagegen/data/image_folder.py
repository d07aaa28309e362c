"""Any folder of images as a data set."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8, UInt64

from imagegen.core.errors import UserError
from imagegen.core.files import sha256_of
from imagegen.core.spec import ImageSpec
from imagegen.data.base import (
    SPLIT_NAMES,
    ImageDataset,
    ImageSplit,
    check_split_name,
    data_folder,
)
from imagegen.data.convert import (
    FIRST_SUFFIXES,
    SUFFIXES,
    check_channels,
    fit_image,
    read_image,
)
from imagegen.data.folder_listing import (
    ImageFile,
    Listing,
    Rows,
    cut_by_contents,
    cut_by_position,
    list_folder,
)
from imagegen.data.image_cache import Cache, build_cache, in_blocks, open_cache

CONTENTS, POSITION = "contents", "position"
_CACHE_VERSION = 3  # raise it when conversion changes, so that old caches are not used


class ImageFolder(ImageDataset):
    """A folder of PNG, JPEG, WebP, BMP, GIF, TIFF or AVIF files, nested or flat.

    Images are resized and centre-cropped to one size (see `imagegen.data.convert`) and kept in one
    array, which is built once below `cache` and built again when a file is added, removed or
    changed.

    Folders train, val (valid, validation) and test below `root` are the splits where they are
    there; what is missing is cut from the training images (see `imagegen.data.folder_listing`). The
    first folder level below gives the classes.

    Args:
        root: the folder.
        size: height and width in pixels, or [height, width].
        channels: 1 (grey) or 3 (RGB).
        val_fraction, test_fraction: shares of the training images to cut, between 0 and 1.
        cache: folder for the converted images; None is `cache` in the project's data folder.
        split_by: `contents` or `position`, what decides which images are cut. The default is what
            checkpoints mean that were written before there was a choice.
    """

    name = "image_folder"

    def __init__(
        self,
        root: str | Path | None = None,
        size: int | Sequence[int] = 32,
        channels: int = 3,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        cache: str | Path | None = None,
        split_by: str = POSITION,
    ) -> None:
        if root is None or str(root) in ("", "???"):  # ??? is an omegaconf value that nobody gave
            raise UserError("dataset.root is missing; add dataset.root=<folder of images>.")
        check_channels(channels)
        height, width = _height_and_width(size)
        self.spec = ImageSpec(height=height, width=width, channels=channels, levels=256)
        self.root = Path.cwd() / Path(root).expanduser()
        self.cache = (
            data_folder() / "cache" if cache is None else Path.cwd() / Path(cache).expanduser()
        )
        self.fractions = (
            _fraction("val_fraction", val_fraction),
            _fraction("test_fraction", test_fraction),
        )
        if split_by not in (CONTENTS, POSITION):
            raise UserError(
                f"dataset.split_by={split_by} is unknown; it can be {CONTENTS} or {POSITION}."
            )
        self.split_by = split_by
        self._opened: Cache | None = None

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the first folder level, or None if some images are in no folder."""
        return self._listing.class_names

    @property
    def left_out(self) -> Mapping[str, int]:
        """Files below the root that are not read."""
        return self._listing.left_out

    def prepare(self) -> None:
        """Convert the images, where that has not been done for the folder as it is now."""
        if self._open() is not None:
            return
        listed = {self.root / file.path: file for file in self._listing.files}
        paths = list(listed)
        contents = self._contents(paths)
        rows = self._share_out(contents)
        ordered = [paths[row] for name in SPLIT_NAMES for row in rows[name]]
        convert = partial(self._convert, listed)
        build_cache(self._cache_file, ordered, self.spec.shape, convert, contents)
        for stale in self.cache.glob(f"{self._cache_prefix}-*.npy"):
            if stale != self._cache_file:
                stale.unlink(missing_ok=True)

    def split(self, which: str) -> ImageSplit:
        """One split: a slice of the memory map."""
        check_split_name(which)
        images, labels = self._cache().images, self._listing.labels
        return ImageSplit(
            images[self._place(which)], None if labels is None else labels[self._rows[which]]
        )

    def sources(self, which: str) -> list[str]:
        """The path of each file below the root."""
        check_split_name(which)
        return [self._listing.files[row].path for row in self._rows[which]]

    def digests(self, which: str) -> Int64[np.ndarray, " n"]:
        """`image_digests` of a split, as they were when the images were converted."""
        check_split_name(which)
        return self._cache().digests[self._place(which)]

    def _cache(self) -> Cache:
        opened = self._open()
        if opened is None:
            self.prepare()
            opened = self._open()
        if opened is None:
            raise UserError(f"{self._cache_file} cannot be read; check the folder's permissions.")
        return opened

    def _open(self) -> Cache | None:
        # Kept open: another process that finds the folder changed removes the file.
        if self._opened is None:
            shape = (len(self._listing.files), *self.spec.shape)
            self._opened = open_cache(self._cache_file, shape)
        return self._opened

    def _contents(self, paths: Sequence[Path]) -> UInt64[np.ndarray, " n"]:
        """The first 64 bits of the SHA-256 of each file, which decide its split."""
        if self.split_by == POSITION:
            return np.zeros(len(paths), dtype=np.uint64)
        blocks = in_blocks("reading images", paths, lambda path: int(sha256_of(path)[:16], 16))
        return np.array([digest for block in blocks for digest in block], dtype=np.uint64)

    def _share_out(self, contents: UInt64[np.ndarray, " n"]) -> Rows:
        if self.split_by == POSITION:
            return cut_by_position(self.root, self._listing.given, *self.fractions)
        return cut_by_contents(self.root, self._listing.given, *self.fractions, contents)

    @cached_property
    def _rows(self) -> Rows:
        return self._share_out(self._cache().contents)

    def _place(self, which: str) -> slice:
        """Where a split's images are in the array."""
        before = SPLIT_NAMES[: SPLIT_NAMES.index(which)]
        start = sum(len(self._rows[name]) for name in before)
        return slice(start, start + len(self._rows[which]))

    def _convert(self, listed: Mapping[Path, ImageFile], path: Path) -> UInt8[np.ndarray, "h w c"]:
        image = fit_image(read_image(path, self.spec.channels), *self.spec.shape[:2])
        status, file = path.stat(), listed[path]
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            raise UserError(
                f"{path} has been changed while the images were converted; run the command again."
            )
        return image

    @cached_property
    def _listing(self) -> Listing:
        # One more kind of file would change all positions.
        return list_folder(self.root, FIRST_SUFFIXES if self.split_by == POSITION else SUFFIXES)

    @cached_property
    def _cache_prefix(self) -> str:
        """The same for one folder and one set of options, whatever the folder holds."""
        word = re.sub(r"[^A-Za-z0-9_-]", "_", self.root.name)[:40] or "images"
        size = "x".join(str(length) for length in self.spec.shape)
        options = [str(self.root), *self.fractions]
        if self.split_by != POSITION:
            options.append(self.split_by)
        return f"{word}-{size}-{_digest(options, 8)}"

    @cached_property
    def _cache_file(self) -> Path:
        files = [[file.path, file.size, file.mtime_ns] for file in self._listing.files]
        key = _digest([_CACHE_VERSION, files], 16)
        return self.cache / f"{self._cache_prefix}-{key}.npy"


def _digest(value: object, length: int) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:length]


def _height_and_width(size: object) -> tuple[int, int]:
    pair = [size, size] if isinstance(size, int) else size
    if (
        not isinstance(pair, Sequence)
        or isinstance(pair, str)
        or len(pair) != 2
        or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair)
    ):
        raise UserError(
            f"dataset.size={size}, but it must be a number of pixels or [height,width]."
        )
    return pair[0], pair[1]


def _fraction(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise UserError(f"dataset.{name}={value}, but it must be between 0 and 1.")
    return float(value)
