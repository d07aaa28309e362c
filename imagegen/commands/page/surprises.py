"""What surprises the model in an image that a visitor shows it, computed once for each image.

Axes: `h w c` height, width, channel.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, UInt8

from imagegen.commands.page.studio import Studio, Version
from imagegen.core import values as opt
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec

if TYPE_CHECKING:
    from imagegen.checkpoint.reading import LoadedCheckpoint
    from imagegen.data.base import ImageDataset
else:  # Annotations are checked in tests; these are imported late.
    ImageDataset = LoadedCheckpoint = Any

MOST_VISITORS = 32
"""Whose images are kept; the one who asked longest ago has to show it again."""


@dataclass(frozen=True)
class Picture:
    """An image to look at.

    Attributes:
        levels: of its pixels.
        name: its file or place.
        label: name of its class; None for none.
    """

    levels: UInt8[np.ndarray, "h w c"]
    name: str
    label: str | None = None


@dataclass(frozen=True)
class Looked:
    """An image and what the model says of it.

    Attributes:
        picture: the image.
        spec: of the images of the model.
        number: of its class; None for none.
        bits: of each pixel, all channels together.
        best: the likeliest level of each value.
        version: of the model that was asked.
    """

    picture: Picture
    spec: ImageSpec
    number: int | None
    bits: Float64[np.ndarray, "h w"]
    best: UInt8[np.ndarray, "h w c"]
    version: Version

    @property
    def bits_per_dim(self) -> float:
        """Of the whole image."""
        return float(self.bits.sum()) / self.picture.levels.size

    @property
    def first(self) -> tuple[int, int]:
        """Row and column of the most surprising pixel."""
        row, column = np.unravel_index(int(self.bits.argmax()), self.bits.shape)
        return int(row), int(column)


@dataclass(frozen=True)
class Pixel:
    """What the model expected at a pixel.

    Attributes:
        row, column: from 0.
        levels: those of the image, a channel each.
        probabilities: of every level, given the values before it.
        bits: of the pixel.
    """

    row: int
    column: int
    levels: UInt8[np.ndarray, " c"]
    probabilities: Float64[np.ndarray, "c levels"]
    bits: float


class Surprises:
    """Images that the visitors of the page look at."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self._looked: OrderedDict[str, Looked] = OrderedDict()
        self._lock, self._one = threading.Lock(), threading.Lock()
        self._dataset: tuple[Version, ImageDataset] | None = None

    def look(self, visitor: str, which: Picture | int) -> Looked:
        """Ask the model about an image, or about one of its data set's test split.

        Raises:
            Stopped: where the visitor wants something else by now.
            UserError: where there is no such image, or the model cannot say anything of it.
        """

        def work(show: Callable[[Looked], None]) -> Looked:
            from imagegen.evaluation.scores import checked
            from imagegen.evaluation.surprise import bits_of_pixels, likeliest

            version = self.studio.version()
            loaded = self.studio.desk.loaded(version, self.studio.device)
            if isinstance(which, Picture):
                picture = which
            else:
                picture = self._test_image(loaded, self._prepared(loaded, version), which)
            number = self.studio.number_of(picture.label)
            image = picture.levels[None]
            labels = None if number is None else np.array([number], dtype=np.int64)
            bits = bits_of_pixels(loaded.model, image, labels)
            checked(bits.sum(axis=(1, 2)))
            best = likeliest(loaded.model, image, labels)[0]
            return Looked(picture, loaded.model.spec, number, bits[0], best, version)

        (looked,) = self.studio.run(visitor, work)
        with self._lock:
            self._looked[visitor] = looked
            self._looked.move_to_end(visitor)
            if len(self._looked) > MOST_VISITORS:
                self._looked.popitem(last=False)
        return looked

    def shown(self, visitor: str) -> Looked:
        """The image that a visitor looks at.

        Raises:
            UserError: where there is none, or another model by now.
        """
        with self._lock:
            looked = self._looked.get(visitor)
        if looked is None:
            raise UserError("no image is shown; load one, or show one of the test images.")
        if looked.version != self.studio.version():
            raise UserError("the checkpoint has changed since; show the image again.")
        return looked

    def at(self, visitor: str, row: int, column: int) -> Pixel:
        """What was expected at a pixel of the image that a visitor looks at.

        Raises:
            UserError: where there is no such pixel, and as `shown`.
        """
        from imagegen.evaluation.surprise import distribution_at

        looked = self.shown(visitor)
        model, levels = self.studio.loaded().model, looked.picture.levels
        with self._one:  # Each of several at once would take its own memory.
            probabilities = [
                distribution_at(model, levels, row, column, channel, looked.number)
                for channel in range(levels.shape[2])
            ]
        bits = float(looked.bits[row, column])
        return Pixel(row, column, levels[row, column], np.stack(probabilities), bits)

    def _test_image(self, loaded: LoadedCheckpoint, dataset: ImageDataset, index: int) -> Picture:
        from imagegen.checkpoint.training_data import class_numbers

        split = dataset.split("test")
        if not len(split):
            raise UserError(f"the test split of {dataset.name} holds no images; load a file.")
        opt.whole_number(index, "test image", 0, len(split) - 1)
        name, label = dataset.sources("test")[index], None
        if split.labels is not None:
            given = int(split.labels[index])
            name += f" ({dataset.class_names[given] if dataset.class_names else given})"
            if loaded.model.n_classes is not None:
                number = class_numbers(loaded.metadata, dataset)[given]
                label = self.studio.class_names()[number]
        return Picture(np.array(split.images[index]), name, label)

    def _prepared(self, loaded: LoadedCheckpoint, version: Version) -> ImageDataset:
        """The data set of the model, if its files are on this machine."""
        from imagegen.checkpoint.training_data import dataset_of

        if self._dataset is None or self._dataset[0] != version:
            config = loaded.metadata["dataset"]
            # Nothing is downloaded for visitors, unless whoever serves the page says so.
            wanted = {"download": False, **self.studio.dataset}
            local = {name: value for name, value in wanted.items() if name in config}
            dataset = dataset_of(loaded.metadata, local, loaded.model.spec)
            self._dataset = (version, dataset)
        return self._dataset[1]
