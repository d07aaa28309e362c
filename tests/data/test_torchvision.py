"""MNIST, Fashion-MNIST and CIFAR-10 from files in torchvision's own layouts."""

import gzip
import hashlib
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torchvision import datasets

from imagegen.build import build
from imagegen.data.base import ImageDataset, ImageSplit
from imagegen.data.cifar10 import CIFAR10
from imagegen.data.mnist import MNIST, FashionMNIST
from imagegen.data.torchvision_base import TorchvisionDataset
from imagegen.errors import UserError

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


@pytest.mark.parametrize("cls", [MNIST, FashionMNIST])
def test_mnist_layout(tmp_path: Path, cls: type[MNIST]) -> None:
    arrays = write_mnist(tmp_path, cls.folder.split("/")[0])
    target = f"imagegen.data.mnist.{cls.__name__}"
    for root in (tmp_path, str(tmp_path)):
        config = {"_target_": target, "root": root, "download": False}
        check_splits(build(config, ImageDataset), arrays)


def test_splits_are_the_same_for_every_instance(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    first, second = (MNIST(tmp_path, download=False).split("val") for _ in range(2))
    assert np.array_equal(first.images, second.images)


def test_nothing_is_downloaded_while_all_is_there(tmp_path: Path) -> None:
    check_splits(MNIST(tmp_path), write_mnist(tmp_path))  # the network is off in tests


def test_gzipped_files_are_unpacked(tmp_path: Path) -> None:
    arrays = write_mnist(tmp_path)
    for path in list((tmp_path / "MNIST" / "raw").iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    check_splits(MNIST(tmp_path, download=False), arrays)


def test_a_broken_gzip_file_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    raw = tmp_path / "MNIST" / "raw"
    path = raw / "train-images-idx3-ubyte"
    archive = path.with_name(f"{path.name}.gz")
    archive.write_bytes(gzip.compress(path.read_bytes())[:-100])
    path.unlink()
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz cannot be unpacked"):
        MNIST(tmp_path, download=False).prepare()
    assert len(list(raw.iterdir())) == 4


def test_cifar_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = write_cifar(tmp_path, monkeypatch)
    config = {"_target_": "imagegen.data.cifar10.CIFAR10", "root": str(tmp_path), "download": False}
    dataset = build(config, ImageDataset)
    check_splits(dataset, arrays)
    assert dataset.spec.shape == (32, 32, 3)
    assert dataset.split("train").images.flags.c_contiguous


def test_cifar_archive_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = write_cifar(tmp_path / "made", monkeypatch)
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "made" / "cifar-10-batches-py", "cifar-10-batches-py")
    dataset = CIFAR10(tmp_path, download=False)
    with pytest.raises(UserError, match=r"cifar-10-python\.tar\.gz is damaged"):
        dataset.prepare()
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    check_splits(dataset, arrays)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        "made",
    ]


def test_a_changed_cifar_file_is_never_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path, monkeypatch)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    with pytest.raises(UserError, match="data_batch_3 is damaged"):
        CIFAR10(tmp_path).split("train")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("cls", [MNIST, FashionMNIST, CIFAR10])
def test_missing_files_with_downloads_off(tmp_path: Path, cls: type[TorchvisionDataset]) -> None:
    dataset = cls(tmp_path, download=False)
    for step in (dataset.prepare, lambda: dataset.split("test")):
        with pytest.raises(UserError, match=rf"{tmp_path / cls.folder}.*download=true"):
            step()
    assert not list(tmp_path.iterdir())


def _no_route(*_: object, **__: object) -> None:
    raise OSError("no route to host")


@pytest.mark.parametrize("cls", [MNIST, FashionMNIST, CIFAR10])
def test_a_failed_download_is_one_sentence(
    tmp_path: Path, cls: type[TorchvisionDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", _no_route)
    with pytest.raises(UserError, match=r"could not be downloaded.*no route to host") as caught:
        cls(tmp_path / "new").prepare()
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "new").iterdir())


def test_a_download_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays: Arrays = {}

    def download(self: datasets.MNIST) -> None:
        arrays.update(write_mnist(Path(self.root)))

    monkeypatch.setattr(datasets.MNIST, "download", download)
    dataset = MNIST(tmp_path / "new")
    dataset.prepare()
    check_splits(dataset, arrays)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["MNIST"]


def test_an_unwritable_root(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="could not be downloaded"):
        MNIST(tmp_path / "file" / "below").prepare()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], "is damaged"),
        (lambda content: content + b"x", "is damaged"),
        (lambda content: content[:7], "is not an IDX file"),
        (lambda content: b"\x1f\x8b" + content, "is not an IDX file"),
        (lambda content: b"", "is not an IDX file"),
    ],
)
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"])
def test_damaged_mnist_files_are_named(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str, name: str
) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "MNIST" / "raw" / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=f"{name} {message}"):
        MNIST(tmp_path, download=False).split("val")


def test_images_of_another_size(tmp_path: Path) -> None:
    write_mnist(tmp_path, size=27)
    with pytest.raises(UserError, match="does not hold MNIST"):
        MNIST(tmp_path, download=False).split("test")


def test_real_mnist(shared_data: Path) -> None:
    dataset = MNIST(shared_data, download=False)
    dataset.prepare()
    train, val, test = (dataset.split(name) for name in ("train", "val", "test"))
    assert [len(split) for split in (train, val, test)] == [55_000, 5_000, 10_000]
    assert test.labels is not None
    assert test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    digest = hashlib.sha256(val.images.tobytes()).hexdigest()[:16]
    assert digest == "1f3fd3230d6adcf1"  # published bits/dim depend on the choice
