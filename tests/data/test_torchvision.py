"""MNIST, Fashion-MNIST and CIFAR-10 from files in torchvision's own layouts."""

import gzip
import hashlib
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torchvision import datasets

from imagegen.core.build import build
from imagegen.core.errors import UserError
from imagegen.data.base import ImageDataset
from imagegen.data.cifar10 import CIFAR10
from imagegen.data.mnist import MNIST, FashionMNIST
from imagegen.data.torchvision_base import TorchvisionDataset
from tests.data.official import Arrays, check_splits, write_cifar, write_mnist


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
        with pytest.raises(UserError) as caught:
            step()
        assert str(caught.value) == (
            f"{cls.title} was not found: {tmp_path / cls.folder / cls.files[0]} is missing; set "
            f"dataset.root to the folder that holds {cls.folder}, or dataset.download=true."
        )
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
    assert not (tmp_path / "new").exists()


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
        (
            lambda content: b"<!DOCTYPE html><html><body>not here</body></html>",
            "is not an IDX file",
        ),
        (lambda content: content[:4] + b"\xff\xff\xff\xff" + content[8:], "is damaged"),
        (lambda content: content[:4] + bytes(4) + content[8:], "holds no (images|labels)"),
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


def test_sizes_whose_product_overflows(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    # In 64 bits the product of these sizes is 0.
    path.write_bytes(struct.pack(">4I", 0x803, 1 << 31, 1 << 31, 4))
    with pytest.raises(UserError, match="is damaged: it has 16 bytes, but its header promises"):
        MNIST(tmp_path, download=False).split("test")


def test_labels_that_are_no_class(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\x0a")
    with pytest.raises(UserError, match="labels reach from 0 to 10, but there are 10 classes"):
        MNIST(tmp_path, download=False).split("val")


def test_what_early_versions_of_torchvision_left_is_not_read(tmp_path: Path) -> None:
    arrays = write_mnist(tmp_path)
    processed = tmp_path / "MNIST" / "processed"
    processed.mkdir()
    for name in ("training.pt", "test.pt"):
        (processed / name).write_text("half a file")
    check_splits(MNIST(tmp_path, download=False), arrays)


def test_real_mnist(shared_data: Path) -> None:
    dataset = MNIST(shared_data, download=False)
    dataset.prepare()
    train, val, test = (dataset.split(name) for name in ("train", "val", "test"))
    assert [len(split) for split in (train, val, test)] == [55_000, 5_000, 10_000]
    assert test.labels is not None
    assert test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    digest = hashlib.sha256(val.images.tobytes()).hexdigest()[:16]
    assert digest == "1f3fd3230d6adcf1"  # published bits/dim depend on the choice
