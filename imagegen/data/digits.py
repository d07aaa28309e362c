"""The 8x8 digits that ship inside scikit-learn: nothing to download."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from imagegen.core.spec import ImageSpec
from imagegen.data.base import ImageDataset, ImageSplit, check_split_name, hold_out

TEST_IMAGES = 360
VAL_IMAGES = 144


class Digits(ImageDataset):
    """1,797 handwritten digits of 8x8 pixels and 17 grey levels (0 to 16).

    It has no official split; a fixed one holds 1,293 training, 144 validation and 360 test
    images.
    """

    name = "digits"
    class_names = tuple(str(digit) for digit in range(10))

    def __init__(self) -> None:
        self.spec = ImageSpec(height=8, width=8, channels=1, levels=17)

    def split(self, which: str) -> ImageSplit:
        """One split."""
        check_split_name(which)
        return self._splits[which]

    @cached_property
    def _splits(self) -> dict[str, ImageSplit]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = digits.images.astype(np.uint8)[..., None]
        labels = digits.target.astype(np.int64)
        rest, test = hold_out(len(images), TEST_IMAGES)
        stays, cut = hold_out(len(rest), VAL_IMAGES)
        rows = {"train": rest[stays], "val": rest[cut], "test": test}
        return {name: ImageSplit(images[row], labels[row]) for name, row in rows.items()}
