"""Any folder of images as a data set."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from imagegen.data.base import ImageDataset, ImageSplit, check_split_name, data_folder
from imagegen.data.convert import check_channels, fit_image, read_image
from imagegen.data.folder_listing import ImageFile, Listing, list_folder
from imagegen.data.image_cache import build_cache, open_cache
from imagegen.errors import UserError
from imagegen.spec import ImageSpec

_CACHE_VERSION = 2  # raise it when conversion changes, so that old caches are not used


class ImageFolder(ImageDataset):
    """A folder of PNG, JPEG, WebP, BMP, GIF or TIFF files, nested or flat.

    Images are resized and centre-cropped to one size (see `imagegen.data.convert`) and kept in one
    array, which is built once below `cache` and built again when a file is added, removed or
    changed.

    Folders train, val (valid, validation) and test below `root` are the splits where they are
    there; what is missing is cut from the training images by a fixed seed. The first folder level
    below gives the classes.

    Args:
        root: the folder.
        size: height and width in pixels, or [height, width].
        channels: 1 (grey) or 3 (RGB).
        val_fraction, test_fraction: shares of the training images to cut, between 0 and 1.
        cache: folder for the converted images; None is `cache` in the project's data folder.
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
        self._images: np.ndarray | None = None

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the first folder level, or None where some images lie in no folder."""
        return self._listing.class_names

    def prepare(self) -> None:
        """Convert the images, where that has not been done for the folder as it is now."""
        if self._open() is not None:
            return
        listed = {self.root / file.path: file for file in self._listing.files}
        build_cache(self._cache_file, list(listed), self.spec.shape, partial(self._convert, listed))
        for stale in self.cache.glob(f"{self._cache_prefix}-*.npy"):
            if stale != self._cache_file:
                stale.unlink(missing_ok=True)

    def split(self, which: str) -> ImageSplit:
        """One split: a slice of the memory map."""
        check_split_name(which)
        images = self._open()
        if images is None:
            self.prepare()
            images = self._open()
        if images is None:
            raise UserError(f"{self._cache_file} cannot be read; check the folder's permissions.")
        labels = self._listing.labels
        return ImageSplit(
            images[self._listing.rows(which)], None if labels is None else labels[which]
        )

    def _open(self) -> UInt8[np.ndarray, "n h w c"] | None:
        # Kept open: another process that finds the folder changed removes the file.
        if self._images is None:
            shape = (len(self._listing.files), *self.spec.shape)
            self._images = open_cache(self._cache_file, shape)
        return self._images

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
        return list_folder(self.root, *self.fractions)

    @cached_property
    def _cache_prefix(self) -> str:
        """The same for one folder and one set of options, whatever the folder holds."""
        word = re.sub(r"[^A-Za-z0-9_-]", "_", self.root.name)[:40] or "images"
        size = "x".join(str(length) for length in self.spec.shape)
        return f"{word}-{size}-{_digest([str(self.root), *self.fractions], 8)}"

    @cached_property
    def _cache_file(self) -> Path:
        files = [[file.path, file.size, file.mtime_ns] for file in self._listing.files]
        splits = [len(self._listing.splits[name]) for name in ("train", "val", "test")]
        key = _digest([_CACHE_VERSION, files, splits], 16)
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
        raise UserError(f"dataset.{name}={value}, but it must lie between 0 and 1.")
    return float(value)
