"""MNIST and Fashion-MNIST, read through torchvision."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.torchvision_base import TorchvisionDataset, unpack_gzip

_HEADER_BYTES = {"images": 16, "labels": 8}


class MNIST(TorchvisionDataset):
    """70,000 handwritten digits, 28x28 grey: 55,000 train, 5,000 val, 10,000 test.

    Reads `root/MNIST/raw/`, where the four files may also be gzipped.
    """

    name = "mnist"
    title = "MNIST"
    folder = "MNIST/raw"
    files = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )
    class_names = tuple(str(digit) for digit in range(10))

    def __init__(self, root: str | Path | None = None, download: bool = True) -> None:
        super().__init__(root, download)
        self.spec = ImageSpec(height=28, width=28, channels=1, levels=256)

    def _torchvision_class(self) -> Any:
        from torchvision import datasets

        return datasets.MNIST

    def _unpack(self) -> None:
        for path in self._missing():
            archive = path.with_name(f"{path.name}.gz")
            if archive.is_file():
                try:
                    unpack_gzip(archive, path)
                except (EOFError, OSError, zlib.error) as error:
                    raise UserError(
                        f"{archive} cannot be unpacked ({error}); replace it with a whole file in "
                        "a folder that can be written."
                    ) from error

    def _read(
        self, official_train: bool
    ) -> tuple[UInt8[np.ndarray, "n h w c"], Int64[np.ndarray, " n"]]:
        prefix = "train" if official_train else "t10k"
        for name in self.files:
            if name.startswith(prefix):
                _check_size(self.root / self.folder / name)
        # Not through the class, which prefers what its early versions left in processed/.
        from torchvision.datasets.mnist import read_image_file, read_label_file

        folder = self.root / self.folder
        images = read_image_file(str(folder / f"{prefix}-images-idx3-ubyte"))
        labels = read_label_file(str(folder / f"{prefix}-labels-idx1-ubyte"))
        return images.numpy()[..., None], labels.numpy().astype(np.int64)


class FashionMNIST(MNIST):
    """70,000 articles of clothing in MNIST's format, below `root/FashionMNIST/raw/`."""

    name = "fashion_mnist"
    title = "Fashion-MNIST"
    folder = "FashionMNIST/raw"
    class_names = (
        "t-shirt",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    )

    def _torchvision_class(self) -> Any:
        from torchvision import datasets

        return datasets.FashionMNIST


def _check_size(path: Path) -> None:
    """Compare an IDX file's size with its header, since torchvision would not name the file."""
    kind = "images" if "images" in path.name else "labels"
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES[kind])
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    axes = 3 if kind == "images" else 1
    if len(header) < _HEADER_BYTES[kind] or header[:4] != bytes([0, 0, 8, axes]):
        raise UserError(f"{path} is not an IDX file of {kind}; replace it.")
    expected = len(header) + math.prod(np.frombuffer(header[4:], dtype=">u4").tolist())
    if expected == len(header):
        raise UserError(f"{path} holds no {kind}; replace it.")
    if size != expected:
        raise UserError(
            f"{path} is damaged: it has {size} bytes, but its header promises {expected}; "
            "replace it."
        )
