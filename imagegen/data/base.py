"""What a data set of images offers, whatever its source.

Axes: `n` images, `h` height, `w` width, `c` channels.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from imagegen.core.errors import UserError
from imagegen.core.installation import PROJECT_ROOT
from imagegen.core.spec import ImageSpec

SPLIT_NAMES = ("train", "val", "test")

# Fixed: which images are held out never depends on a run's seed, so that bits/dim stay comparable.
SPLIT_SEED = 2020


def data_folder() -> Path:
    """`data/` of the clone or, without one, of the folder that the command was started in."""
    return PROJECT_ROOT / "data"


@dataclass(frozen=True)
class ImageSplit:
    """The images of one split, all in one array.

    Attributes:
        images: levels 0 to spec.levels - 1; may be a read-only memory map.
        labels: class numbers, or None where the data set has no classes.
    """

    images: UInt8[np.ndarray, "n h w c"]
    labels: Int64[np.ndarray, " n"] | None = None

    def __len__(self) -> int:
        return len(self.images)


class ImageDataset(ABC):
    """A data set with three disjoint splits.

    `val` is cut from the training images by a seed that never changes; `test` is the official test
    set where there is one. Building an instance reads no data: `prepare` and `split` do.

    Attributes:
        name: one word, as a user types it.
        spec: shape and levels of every image.
    """

    name: str
    spec: ImageSpec

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes that labels count, or None without labels."""
        return None

    @property
    def left_out(self) -> Mapping[str, int]:
        """How many files beside the images are not read, by their suffix."""
        return {}

    def prepare(self) -> None:
        """Download or convert what `split` needs; does nothing where that is already there.

        Call it in one process a machine, before any `split`.

        Raises:
            UserError: where data are missing, broken, or cannot be written.
        """
        return None

    @abstractmethod
    def split(self, which: str) -> ImageSplit:
        """One split, the same images in the same order each time.

        Raises:
            UserError: where data are missing or broken, or `which` is not a split.
        """

    def sources(self, which: str) -> list[str]:
        """What to call each image of a split: its file or else its place, such as mnist/test/7.

        Raises:
            UserError: as `split`.
        """
        return [f"{self.name}/{which}/{index}" for index in range(len(self.split(which)))]

    def digests(self, which: str) -> Int64[np.ndarray, " n"]:
        """`image_digests` of a split, in its order.

        Raises:
            UserError: as `split`.
        """
        return image_digests(self.split(which).images)


def image_digests(images: UInt8[np.ndarray, "n h w c"]) -> Int64[np.ndarray, " n"]:
    """64 bits of BLAKE2b of the levels of each image: equal for equal images of one shape.

    That two of a million different images share theirs has a probability of 3e-8.
    """
    found = (hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in images)
    return np.frombuffer(b"".join(found), "<i8").astype(np.int64)


def check_split_name(which: str) -> None:
    """Refuse anything but train, val and test.

    Raises:
        UserError: for another name.
    """
    if which not in SPLIT_NAMES:
        raise UserError(f"split {which!r} is unknown; it can be {', '.join(SPLIT_NAMES)}.")


def hold_out(
    n: int, count: int, seed: int = SPLIT_SEED
) -> tuple[Int64[np.ndarray, " rest"], Int64[np.ndarray, " count"]]:
    """Choose `count` of `n` images at random: (positions that stay, positions held out), sorted.

    The choice is a pure function of the arguments, on every machine and with every version of
    NumPy, because RandomState's stream is frozen where Generator's is not.
    """
    order = np.random.RandomState(seed).permutation(n).astype(np.int64)
    return np.sort(order[count:]), np.sort(order[:count])
