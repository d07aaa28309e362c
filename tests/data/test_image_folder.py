import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from imagegen.build import build
from imagegen.data.base import SPLIT_NAMES, ImageDataset
from imagegen.data.folder_listing import list_folder
from imagegen.data.image_folder import ImageFolder
from imagegen.errors import UserError


def write_image(path: Path, level: int, size: tuple[int, int] = (5, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level, level, level)).save(path)


def folder(tmp_path: Path, *names: str) -> Path:
    """A folder whose image number i (in the order given) is plain grey of level i."""
    root = tmp_path / "pictures"
    for level, name in enumerate(names):
        write_image(root / name, level)
    return root


def opened(root: Path, **options: object) -> ImageFolder:
    dataset = ImageFolder(root, cache=root.parent / "cache", **options)
    dataset.prepare()
    return dataset


def levels(dataset: ImageDataset, which: str) -> list[int]:
    return [int(image[0, 0, 0]) for image in dataset.split(which).images]


def all_levels(dataset: ImageDataset) -> list[int]:
    return sorted(level for name in SPLIT_NAMES for level in levels(dataset, name))


FLAT = [f"{number:03}.png" for number in range(50)]


def test_a_flat_folder_is_cut_into_three(tmp_path: Path) -> None:
    dataset = opened(folder(tmp_path, *FLAT), size=[3, 6])
    splits = [levels(dataset, name) for name in SPLIT_NAMES]
    assert [len(split) for split in splits] == [40, 5, 5]
    assert all_levels(dataset) == list(range(50))
    assert dataset.class_names is None
    train = dataset.split("train")
    assert train.labels is None
    assert train.images.shape == (40, 3, 6, 3)
    assert train.images.dtype == np.uint8
    assert isinstance(train.images, np.memmap)


def test_the_cut_depends_on_nothing_but_the_folder(tmp_path: Path) -> None:
    root = folder(tmp_path, *FLAT)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    first, second = opened(root), opened(copy, size=8, channels=1)
    assert levels(first, "test") == levels(second, "test")
    assert second.split("val").images.shape[1:] == (8, 8, 1)


def test_nested_folders_give_classes(tmp_path: Path) -> None:
    names = [f"{kind}/{place}.png" for kind in ("cat", "ant") for place in ("0", "1", "x/2", "x/3")]
    dataset = opened(folder(tmp_path, *names))
    assert dataset.class_names == ("ant", "cat")
    for name in SPLIT_NAMES:
        split = dataset.split(name)
        assert split.labels is not None
        assert [int(level < 4) for level in levels(dataset, name)] == split.labels.tolist()


@pytest.mark.parametrize("val", ["val", "valid", "validation", "VAL"])
def test_split_folders_are_kept(tmp_path: Path, val: str) -> None:
    names = ["train/a/0.png", "train/b/1.png", f"{val}/b/2.png", "test/a/3.png", "test/b/4.png"]
    dataset = opened(folder(tmp_path, *names))
    assert [levels(dataset, name) for name in SPLIT_NAMES] == [[0, 1], [2], [3, 4]]
    assert dataset.class_names == ("a", "b")
    assert dataset.split("test").labels.tolist() == [0, 1]


def test_missing_splits_are_cut_from_train(tmp_path: Path) -> None:
    train = [f"train/{number:02}.png" for number in range(20)]
    dataset = opened(folder(tmp_path, *train, "test/x.png"), val_fraction=0.25)
    assert levels(dataset, "test") == [20]
    assert len(levels(dataset, "val")) == 5
    assert sorted(levels(dataset, "train") + levels(dataset, "val")) == list(range(20))


def test_three_images_are_enough_and_two_are_not(tmp_path: Path) -> None:
    root = folder(tmp_path, "0.png", "1.png", "2.png")
    assert [len(levels(opened(root), name)) for name in SPLIT_NAMES] == [1, 1, 1]
    (root / "0.png").unlink()
    with pytest.raises(UserError, match=r"too few images \(2\)"):
        opened(root)


def test_split_folders_beside_other_images_are_refused(tmp_path: Path) -> None:
    root = folder(tmp_path, "test/0.png", "cars/1.png", "cars/2.png")
    with pytest.raises(UserError, match=r"mixes .* cars/1\.png"):
        opened(root)
    shutil.rmtree(root / "cars")
    with pytest.raises(UserError, match="no training images"):
        opened(root)


def test_other_files_and_hidden_ones_are_left_out(tmp_path: Path) -> None:
    root = folder(tmp_path, "0.png", "1.PNG", "2.jpg", "3.webp", "4.bmp", "5.gif", "6.tif")
    (root / "notes.txt").write_text("hello")
    write_image(root / ".hidden" / "7.png", 7)
    write_image(root / ".8.png", 8)
    (root / "loop").symlink_to(root)
    files = list_folder(root, 0.1, 0.1).files
    names = sorted(file.path for file in files)
    assert names == ["0.png", "1.PNG", "2.jpg", "3.webp", "4.bmp", "5.gif", "6.tif"]


def test_folders_without_images(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no images"):
        opened(tmp_path / "empty")
    with pytest.raises(UserError, match="is not a folder"):
        opened(tmp_path / "none")
    assert not (tmp_path / "cache").exists()


def test_a_broken_file_is_named_and_leaves_no_cache(tmp_path: Path) -> None:
    root = folder(tmp_path, *FLAT)
    (root / "007.png").write_bytes((root / "007.png").read_bytes()[:50])
    with pytest.raises(UserError, match=r"007\.png cannot be read"):
        opened(root)
    assert not list((tmp_path / "cache").iterdir())


def test_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path, *FLAT)
    opened(root)
    monkeypatch.setattr("imagegen.data.image_folder.read_image", None)
    assert len(levels(opened(root), "train")) == 40


def test_a_changed_folder_is_converted_again(tmp_path: Path) -> None:
    root = folder(tmp_path, *FLAT)
    before = opened(root)
    kept = before.split("train").images
    write_image(root / "000.png", 200)
    os.utime(root / "000.png", ns=(1, 1))
    after = opened(root)
    assert 200 in all_levels(after)
    assert kept.max() < 50  # a running process keeps what it has opened
    (root / "001.png").unlink()
    assert sum(len(levels(opened(root), name)) for name in SPLIT_NAMES) == 49
    assert len(list((tmp_path / "cache").iterdir())) == 1  # stale caches are removed


def test_sizes_have_caches_of_their_own(tmp_path: Path) -> None:
    root = folder(tmp_path, *FLAT)
    for size, channels in ((4, 3), (8, 3), (8, 1)):
        opened(root, size=size, channels=channels)
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_damaged_cache_is_built_again(tmp_path: Path) -> None:
    root = folder(tmp_path, *FLAT)
    opened(root)
    (cache,) = (tmp_path / "cache").iterdir()
    cache.write_bytes(cache.read_bytes()[:-1])
    assert all_levels(opened(root)) == list(range(50))


def test_two_builds_at_once(tmp_path: Path) -> None:
    root = folder(tmp_path, *FLAT)
    failures: list[BaseException] = []

    def build_and_check() -> None:
        try:
            dataset = opened(root)
            assert all_levels(dataset) == list(range(50))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=build_and_check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_an_unwritable_cache(tmp_path: Path) -> None:
    root = folder(tmp_path, *FLAT)
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match=r"cannot be written .* dataset\.cache"):
        opened(root)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root": None}, "dataset.root is missing"),
        ({"root": "???"}, "dataset.root is missing"),
        ({"size": 0}, "dataset.size=0"),
        ({"size": [8]}, r"dataset.size=\[8\]"),
        ({"size": [8, -1]}, "dataset.size"),
        ({"channels": 2}, "channels=2"),
        ({"val_fraction": 1.0}, "val_fraction=1.0"),
        ({"test_fraction": 0.0}, "test_fraction=0.0"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, object], message: str) -> None:
    config = {"_target_": "imagegen.data.image_folder.ImageFolder", "root": str(tmp_path)}
    with pytest.raises(UserError, match=message):
        build({**config, **options}, ImageDataset)
