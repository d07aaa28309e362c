"""A data set whose images say which they are."""

from __future__ import annotations

import numpy as np

from imagegen.core.spec import ImageSpec
from imagegen.data.base import ImageDataset, ImageSplit, check_split_name


class Numbered(ImageDataset):
    """Image i of a split is plain, of level i."""

    name = "numbered"

    def __init__(self, labels: bool = True, **sizes: int) -> None:
        self.spec = ImageSpec(2, 3, 1)
        self.labels = labels
        self.sizes = {"train": 23, "val": 9, "test": 5, **sizes}

    def split(self, which: str) -> ImageSplit:
        check_split_name(which)
        numbers = np.arange(self.sizes[which])
        images = np.broadcast_to(numbers[:, None, None, None], (len(numbers), 2, 3, 1))
        return ImageSplit(
            images.astype(np.uint8), numbers.astype(np.int64) % 10 if self.labels else None
        )
