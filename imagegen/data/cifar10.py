"""CIFAR-10, read through torchvision."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.torchvision_base import TorchvisionDataset


class CIFAR10(TorchvisionDataset):
    """60,000 colour photographs of 32x32 pixels: 45,000 train, 5,000 val, 10,000 test.

    Reads `root/cifar-10-batches-py/`, or unpacks `root/cifar-10-python.tar.gz`. The files are
    pickles, so they are opened only when their checksums are the official ones.
    """

    name = "cifar10"
    title = "CIFAR-10"
    folder = "cifar-10-batches-py"
    files = (
        "data_batch_1",
        "data_batch_2",
        "data_batch_3",
        "data_batch_4",
        "data_batch_5",
        "test_batch",
        "batches.meta",
    )
    class_names = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )

    def __init__(self, root: str | Path | None = None, download: bool = True) -> None:
        super().__init__(root, download)
        self.spec = ImageSpec(height=32, width=32, channels=3, levels=256)

    def _torchvision_class(self) -> Any:
        from torchvision import datasets

        return datasets.CIFAR10

    def _unpack(self) -> None:
        from torchvision.datasets.utils import check_integrity

        official = self._torchvision_class()
        archive = self.root / official.filename
        if not archive.is_file():
            return
        if not check_integrity(archive, official.tgz_md5):
            raise UserError(
                f"{archive} is damaged: its checksum is not the official one; replace or remove it."
            )
        self._fetch(archive)

    def _read(
        self, official_train: bool
    ) -> tuple[UInt8[np.ndarray, "n h w c"], Int64[np.ndarray, " n"]]:
        from torchvision.datasets.utils import check_integrity

        official = self._torchvision_class()
        checksums = [*official.train_list, *official.test_list]
        checksums.append((official.meta["filename"], official.meta["md5"]))
        for name, checksum in checksums:
            path = self.root / self.folder / name
            if not check_integrity(path, checksum):
                raise UserError(
                    f"{path} is damaged: its checksum is not the official one; replace it."
                )
        with warnings.catch_warnings():
            # The files were pickled by an old NumPy, whose dtypes say align=0 instead of False.
            warnings.filterwarnings("ignore", message=r"dtype\(\): align should be passed")
            loaded = official(self.root, train=official_train, download=False)
        return np.ascontiguousarray(loaded.data), np.asarray(loaded.targets, dtype=np.int64)
