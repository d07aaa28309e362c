"""Small data sets in the files of MNIST and CIFAR-10, as torchvision lays them out."""

import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from torchvision import datasets

from imagegen.data.base import ImageDataset, ImageSplit
from imagegen.data.cifar10 import CIFAR10

Arrays = dict[str, tuple[np.ndarray, np.ndarray]]


def random_arrays(seed: int, shape: tuple[int, ...], train: int, test: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {
        name: (
            random.integers(0, 256, (count, *shape), dtype=np.uint8),
            random.integers(0, 10, count, dtype=np.uint8),
        )
        for name, count in (("train", train), ("test", test))
    }


def write_mnist(root: Path, name: str = "MNIST", size: int = 28) -> Arrays:
    arrays = random_arrays(0, (size, size), 60, 7)
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images, labels = arrays[split]
        header = struct.pack(">4I", 0x803, *images.shape)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">2I", 0x801, len(labels))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    return arrays


class _OldArray:
    """An array that is pickled as the published files are, whose dtype says align=0."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __reduce__(self) -> tuple:
        rebuild, arguments, state = self.array.__reduce__()
        version, shape, _, fortran, content = state
        return rebuild, arguments, (version, shape, _OldDtype(), fortran, content)


class _OldDtype:
    def __reduce__(self) -> tuple:
        return np.dtype, ("u1", 0, 1), (3, "|", None, None, None, -1, -1, 0)


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> Arrays:
    """Write batches as CIFAR-10 has them and make torchvision take their checksums for official."""
    arrays = random_arrays(1, (32, 32, 3), 50, 8)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = [f"data_batch_{number}" for number in range(1, 6)]
    parts = [
        (name, images, labels)
        for name, images, labels in zip(
            names,
            np.split(arrays["train"][0], 5),
            np.split(arrays["train"][1], 5),
            strict=True,
        )
    ]
    checksums = []
    for name, images, labels in [*parts, ("test_batch", *arrays["test"])]:
        rows = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), -1)
        entry = {"data": _OldArray(rows), "labels": labels.tolist(), "batch_label": name}
        content = pickle.dumps(entry, protocol=2)
        (folder / name).write_bytes(content)
        checksums.append([name, hashlib.md5(content).hexdigest()])
    content = pickle.dumps({"label_names": list(CIFAR10.class_names)}, protocol=2)
    (folder / "batches.meta").write_bytes(content)
    meta = {**datasets.CIFAR10.meta, "md5": hashlib.md5(content).hexdigest()}
    monkeypatch.setattr(datasets.CIFAR10, "train_list", checksums[:5])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", checksums[5:])
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
    return arrays


def pairs(images: np.ndarray, labels: np.ndarray | None) -> list[tuple[bytes, int]]:
    assert labels is not None
    return sorted((i.tobytes(), int(k)) for i, k in zip(images, labels, strict=True))


def check_splits(dataset: ImageDataset, arrays: Arrays) -> None:
    dataset.prepare()
    train, val, test = (dataset.split(name) for name in ("train", "val", "test"))
    count = len(arrays["train"][0])
    assert (len(train), len(val)) == (count - count // 10, count // 10)
    for split in (train, val, test):
        assert split.images.dtype == np.uint8
        assert split.images.shape[1:] == dataset.spec.shape
    both = ImageSplit(
        np.concatenate([train.images, val.images]), np.concatenate([train.labels, val.labels])
    )
    assert pairs(both.images, both.labels) == pairs(*arrays["train"])
    assert np.array_equal(test.images.reshape(arrays["test"][0].shape), arrays["test"][0])
    assert np.array_equal(test.labels, arrays["test"][1])
