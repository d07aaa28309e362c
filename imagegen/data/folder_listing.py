"""Find the images of a folder and share them out among the splits."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from imagegen.data.base import SPLIT_NAMES, hold_out
from imagegen.data.convert import SUFFIXES
from imagegen.errors import UserError

_SPLIT_FOLDERS = {
    "train": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}


@dataclass(frozen=True)
class ImageFile:
    """A file below the root: its path with forward slashes, size in bytes, and time of change."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Listing:
    """The images of a folder.

    Attributes:
        splits: files of train, val and test, each in the order of their paths.
        class_names: the folders that hold the images, or None where some lie in none.
        labels: class numbers for each split, or None.
    """

    splits: dict[str, list[ImageFile]]
    class_names: tuple[str, ...] | None
    labels: dict[str, Int64[np.ndarray, "n"]] | None

    @property
    def files(self) -> list[ImageFile]:
        """All files: train, then val, then test."""
        return [file for name in SPLIT_NAMES for file in self.splits[name]]

    def rows(self, which: str) -> slice:
        """Where the files of a split stand in `files`."""
        start = 0
        for name in SPLIT_NAMES:
            stop = start + len(self.splits[name])
            if name == which:
                return slice(start, stop)
            start = stop
        raise KeyError(which)


def list_folder(root: Path, val_fraction: float, test_fraction: float) -> Listing:
    """List the images below `root`, hidden files left out.

    Folders train, val (or valid, validation) and test are the splits where they are there; what is
    missing is cut from the training images by a fixed seed, at least one image each. Classes are
    the first folder level below the root or the split's folder.

    Raises:
        UserError: where the folder is missing, holds no images or too few, or mixes split folders
            with other images.
    """
    if not root.is_dir():
        raise UserError(f"dataset.root={root} is not a folder; give a folder of images.")
    files = sorted(_walk(root), key=lambda file: file.path)
    if not files:
        raise UserError(
            f"{root} holds no images ({', '.join(sorted(SUFFIXES))}); give a folder that does."
        )
    splits, official = _official_splits(root, files)
    pool = len(splits["train"])
    for name, fraction in (("test", test_fraction), ("val", val_fraction)):
        if not splits[name]:
            splits["train"], splits[name] = _cut(root, splits["train"], fraction, pool)
    class_names, labels = _classes(splits, official)
    return Listing(splits, class_names, labels)


def _walk(root: Path) -> Iterator[ImageFile]:
    seen: set[str] = set()
    try:
        for folder, folders, names in os.walk(root, followlinks=True, onerror=_raise):
            real = os.path.realpath(folder)
            if real in seen:  # a link that leads back up
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
            place = "".join(f"{part}/" for part in Path(folder).relative_to(root).parts)
            for name in names:
                if name.startswith(".") or os.path.splitext(name)[1].lower() not in SUFFIXES:
                    continue
                status = os.stat(os.path.join(folder, name))
                # A pipe of that name would be waited for.
                if stat.S_ISREG(status.st_mode):
                    yield ImageFile(f"{place}{name}", status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise UserError(
            f"{error.filename or root} cannot be read: {error.strerror or error}."
        ) from error


def _raise(error: OSError) -> None:
    raise error


def _official_splits(root: Path, files: list[ImageFile]) -> tuple[dict[str, list[ImageFile]], bool]:
    """Files by split, and whether folders say so; all are train where no folder does."""
    splits: dict[str, list[ImageFile]] = {name: [] for name in SPLIT_NAMES}
    others: list[ImageFile] = []
    for file in files:
        parts = file.path.split("/")
        split = _SPLIT_FOLDERS.get(parts[0].lower()) if len(parts) > 1 else None
        (others if split is None else splits[split]).append(file)
    if not any(splits.values()):
        splits["train"] = others
        return splits, False
    if others:
        raise UserError(
            f"{root} mixes folders of splits with other images, such as {others[0].path}; put all "
            "training images into train/, or rename the folders train, val, test."
        )
    if not splits["train"]:
        raise UserError(f"{root} has no training images; put them into {root / 'train'}.")
    return splits, True


def _cut(
    root: Path, files: list[ImageFile], fraction: float, pool: int
) -> tuple[list[ImageFile], list[ImageFile]]:
    """Files that stay in train, and those held out: a fraction of the pool, at least one."""
    count = max(1, round(fraction * pool))
    if count >= len(files):
        raise UserError(
            f"{root} holds too few images ({pool}) to train on and to hold some out; add images, "
            "or lower dataset.val_fraction and dataset.test_fraction."
        )
    stays, held = hold_out(len(files), count)
    return [files[row] for row in stays], [files[row] for row in held]


def _classes(
    splits: dict[str, list[ImageFile]], official: bool
) -> tuple[tuple[str, ...] | None, dict[str, Int64[np.ndarray, "n"]] | None]:
    level = 1 if official else 0
    folders: dict[str, list[str]] = {}
    for name, files in splits.items():
        parts = [file.path.split("/") for file in files]
        if any(len(part) < level + 2 for part in parts):
            return None, None
        folders[name] = [part[level] for part in parts]
    class_names = tuple(sorted({folder for found in folders.values() for folder in found}))
    number = {folder: index for index, folder in enumerate(class_names)}
    labels = {
        name: np.array([number[folder] for folder in found], dtype=np.int64)
        for name, found in folders.items()
    }
    return class_names, labels
