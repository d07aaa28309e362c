"""Find the images of a folder and share them out among the splits.

By contents, a file's split follows from a hash of its bytes: whatever is added, removed, renamed or
moved, all other files stay where they are, and copies of a file fall into one split. The bytes are
hashed rather than the pixels, which differ between versions of a decoder: an update would move
images from one split to another. So the same picture saved anew counts as another file.

By position, as up to version 0.1, a seed draws from the sorted list of paths. One more file
then moves others from train to test; runs that began so keep it, or they would do just that.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt64

from imagegen.core.errors import UserError
from imagegen.data.base import SPLIT_NAMES, hold_out
from imagegen.data.convert import SUFFIXES

_SPLIT_FOLDERS = {
    "train": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}

Rows = dict[str, Int64[np.ndarray, " _"]]
"""Positions in a list of files, for each split, in rising order."""


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
        files: in the order of their paths.
        given: the splits that folders name; all files are train where none does.
        class_names: the folders that hold the images, or None if some are in no folder.
        labels: class numbers of the files, or None.
        left_out: how many other files there are, by suffix.
    """

    files: list[ImageFile]
    given: Rows
    class_names: tuple[str, ...] | None
    labels: Int64[np.ndarray, " n"] | None
    left_out: dict[str, int]


def list_folder(root: Path, suffixes: frozenset[str] = SUFFIXES) -> Listing:
    """List the files with one of the `suffixes` below `root`, hidden ones left out.

    Folders train, val (or valid, validation) and test name the splits. Classes are the first folder
    level below the root or the split's folder.

    Raises:
        UserError: where the folder is missing, holds no images, or mixes split folders with other
            images.
    """
    if not root.is_dir():
        raise UserError(
            f"dataset.root={root} is not a folder; give the folder of images, where it is now."
        )
    left_out: Counter[str] = Counter()
    files = sorted(_walk(root, suffixes, left_out), key=lambda file: file.path)
    if not files:
        raise UserError(
            f"{root} holds no images ({', '.join(sorted(suffixes))}); give a folder that does."
        )
    given, official = _official_splits(root, files)
    return Listing(files, given, *_classes(files, level=int(official)), dict(left_out))


def cut_by_position(root: Path, given: Rows, val_fraction: float, test_fraction: float) -> Rows:
    """The splits, those that are not given cut from train at random: at least one file each.

    Args:
        root: for the error.
        given: of a `Listing`.
        val_fraction, test_fraction: shares of the given training files.

    Raises:
        UserError: where there are too few files.
    """
    splits = dict(given)
    pool = len(splits["train"])
    for name, fraction in (("test", test_fraction), ("val", val_fraction)):
        if not len(splits[name]):
            count = max(1, round(fraction * pool))
            if count >= len(splits["train"]):
                raise UserError(
                    f"{root} holds too few images ({pool}) to train on and to hold some out; add "
                    "images, or lower dataset.val_fraction and dataset.test_fraction."
                )
            stays, held = hold_out(len(splits["train"]), count)
            splits["train"], splits[name] = splits["train"][stays], splits["train"][held]
    return splits


def cut_by_contents(
    root: Path,
    given: Rows,
    val_fraction: float,
    test_fraction: float,
    digests: UInt64[np.ndarray, " n"],
) -> Rows:
    """The splits, those that are not given cut from train by the files' contents.

    The files with the lowest digests are the test split, those with the highest the validation
    split, up to the fractions of all digests that there can be; so their sizes are those fractions
    on average. Where that leaves a split empty, it gets the next digest: in a folder of a few dozen
    files an addition can therefore move one other file.

    Args:
        root: for the errors.
        given: of a `Listing`.
        val_fraction, test_fraction: shares of the given training files.
        digests: of the contents of all files, evenly distributed.

    Raises:
        UserError: where there are too few files that differ, or the fractions leave none.
    """
    missing = [name for name in ("val", "test") if not len(given[name])]
    if len(missing) == 2 and val_fraction + test_fraction >= 1:
        raise UserError(
            f"dataset.val_fraction={val_fraction} and dataset.test_fraction={test_fraction} leave "
            "nothing to train on; lower them."
        )
    pool = given["train"]
    different, rank = np.unique(digests[pool], return_inverse=True)
    left = len(different)
    if left <= len(missing):
        raise UserError(
            f"{root} holds too few different images ({left}) to train on and to hold some out; add "
            "images."
        )
    splits = dict(given)
    taken = np.zeros(len(pool), dtype=bool)
    if "test" in missing:
        below = np.searchsorted(different, np.uint64(test_fraction * 2.0**64))
        count = min(max(int(below), 1), left - len(missing))
        splits["test"] = pool[rank < count]
        taken |= rank < count
        left -= count
    if "val" in missing:
        # Counted down from the top, so that one fraction does not depend on the other.
        above = np.searchsorted(~different[::-1], np.uint64(val_fraction * 2.0**64))
        count = min(max(int(above), 1), left - 1)
        splits["val"] = pool[rank >= len(different) - count]
        taken |= rank >= len(different) - count
    splits["train"] = pool[~taken]
    return splits


def _walk(root: Path, suffixes: frozenset[str], left_out: Counter[str]) -> Iterator[ImageFile]:
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
                suffix = os.path.splitext(name)[1].lower()
                if name.startswith("."):
                    continue
                if suffix not in suffixes:
                    left_out[suffix] += 1
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


def _official_splits(root: Path, files: Sequence[ImageFile]) -> tuple[Rows, bool]:
    """Files by split, and whether folders say so; all are train where no folder does."""
    splits: dict[str, list[int]] = {name: [] for name in SPLIT_NAMES}
    others: list[int] = []
    for row, file in enumerate(files):
        parts = file.path.split("/")
        split = _SPLIT_FOLDERS.get(parts[0].lower()) if len(parts) > 1 else None
        (others if split is None else splits[split]).append(row)
    if not any(splits.values()):
        return _rows({**splits, "train": others}), False
    if others:
        raise UserError(
            f"{root} mixes folders of splits with other images, such as {files[others[0]].path}; "
            "put all training images into train/, or rename the folders train, val, test."
        )
    if not splits["train"]:
        raise UserError(f"{root} has no training images; put them into {root / 'train'}.")
    return _rows(splits), True


def _rows(splits: Mapping[str, Sequence[int]]) -> Rows:
    return {name: np.array(rows, dtype=np.int64) for name, rows in splits.items()}


def _classes(
    files: Sequence[ImageFile], level: int
) -> tuple[tuple[str, ...] | None, Int64[np.ndarray, " n"] | None]:
    parts = [file.path.split("/") for file in files]
    if any(len(part) < level + 2 for part in parts):
        return None, None
    folders = [part[level] for part in parts]
    class_names = tuple(sorted(set(folders)))
    for name in class_names:
        if name != name.encode(errors="replace").decode():
            shown = name.encode(errors="backslashreplace").decode()
            raise UserError(
                f"the folder {shown} names a class but is not valid UTF-8; rename the folder."
            )
    number = {folder: index for index, folder in enumerate(class_names)}
    return class_names, np.array([number[folder] for folder in folders], dtype=np.int64)
