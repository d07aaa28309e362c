import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from imagegen.core.build import build
from imagegen.core.errors import UserError
from imagegen.data.base import SPLIT_NAMES, ImageDataset, image_digests
from imagegen.data.folder_listing import Rows, cut_by_contents, list_folder
from imagegen.data.image_folder import ImageFolder


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
    dataset = ImageFolder(
        root, **{"cache": root.parent / "cache", "split_by": "contents", **options}
    )
    dataset.prepare()
    return dataset


def levels(dataset: ImageDataset, which: str) -> list[int]:
    return [int(image[0, 0, 0]) for image in dataset.split(which).images]


def all_levels(dataset: ImageDataset) -> list[int]:
    return sorted(level for name in SPLIT_NAMES for level in levels(dataset, name))


FLAT = [f"{number:03}.png" for number in range(50)]


@pytest.mark.parametrize("split_by", ["contents", "position"])
def test_a_flat_folder_is_cut_into_three(tmp_path: Path, split_by: str) -> None:
    dataset = opened(folder(tmp_path, *FLAT), size=[3, 6], split_by=split_by)
    sizes = [len(levels(dataset, name)) for name in SPLIT_NAMES]
    # The bytes of a PNG file, and so its split, are those of Pillow's version.
    assert sizes == [40, 5, 5] if split_by == "position" else min(sizes) > 0
    assert all_levels(dataset) == list(range(50))
    assert dataset.class_names is None
    train = dataset.split("train")
    assert train.labels is None
    assert train.images.shape == (sizes[0], 3, 6, 3)
    assert train.images.dtype == np.uint8
    assert isinstance(train.images, np.memmap)


@pytest.mark.parametrize("split_by", ["contents", "position"])
def test_the_cut_depends_on_nothing_but_the_folder(tmp_path: Path, split_by: str) -> None:
    root = folder(tmp_path, *FLAT)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    first = opened(root, split_by=split_by)
    second = opened(copy, size=8, channels=1, split_by=split_by)
    assert levels(first, "test") == levels(second, "test")
    assert second.split("val").images.shape[1:] == (8, 8, 1)


def test_by_position_is_as_it_was_in_version_0_1(tmp_path: Path) -> None:
    root = folder(tmp_path, *FLAT)
    for dataset in (opened(root, split_by="position"), ImageFolder(root, cache=tmp_path / "cache")):
        assert levels(dataset, "test") == [13, 25, 26, 37, 41]
        assert levels(dataset, "val") == [0, 2, 23, 39, 42]
    # A kind of file that has been read only since then would change all positions.
    write_image(root / "000.png", 200)
    (root / "000.jfif").write_bytes((root / "000.png").read_bytes())
    dataset = opened(root, split_by="position")
    assert levels(dataset, "test") == [13, 25, 26, 37, 41]
    assert dataset.left_out == {".jfif": 1}
    assert len(all_levels(opened(root))) == 51


def splits_by_name(root: Path, **options: object) -> dict[str, str]:
    """The split of each image, by its level."""
    dataset = opened(root, **options)
    return {str(level): name for name in SPLIT_NAMES for level in levels(dataset, name)}


def test_additions_removals_renames_and_moves_leave_all_others_where_they_are(
    tmp_path: Path,
) -> None:
    root = folder(tmp_path, *FLAT)
    before = splits_by_name(root)
    assert set(before.values()) == set(SPLIT_NAMES)

    for number in range(50, 60):
        write_image(root / f"{number - 50:03}a.png", number)
    after = splits_by_name(root)
    assert {level: after[level] for level in before} == before
    assert len(after) == 60

    for name in ("003.png", "013.png", "049.png"):
        (root / name).unlink()
    fewer = splits_by_name(root)
    assert fewer == {
        level: split for level, split in after.items() if level not in ("3", "13", "49")
    }

    for number, path in enumerate(sorted(root.iterdir())):
        path.rename(root / f"x{(7 * number) % 60:03}.png")
    assert splits_by_name(root) == fewer
    moved = tmp_path / "elsewhere" / "under another name"
    shutil.copytree(root, moved)
    shutil.rmtree(root)
    assert splits_by_name(moved, cache=tmp_path / "other") == fewer
    for path in moved.iterdir():
        os.utime(path, ns=(1, 1))
    assert splits_by_name(moved) == fewer


def test_copies_of_an_image_fall_into_one_split(tmp_path: Path) -> None:
    root = folder(tmp_path, *FLAT)
    before = splits_by_name(root)
    for name in FLAT:
        shutil.copy(root / name, root / f"copy of {name}")
    dataset = opened(root)
    for name in SPLIT_NAMES:
        found = levels(dataset, name)
        assert sorted(found) == sorted(2 * [int(key) for key in before if before[key] == name])


def test_both_fractions_are_met_and_do_not_depend_on_each_other() -> None:
    digests = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    given_all = {"train": np.arange(20_000), "val": np.arange(0), "test": np.arange(0)}

    def cut(val: float, test: float, given: Rows = given_all) -> dict[str, set[int]]:
        found = cut_by_contents(Path(), given, val, test, digests)
        return {name: set(rows.tolist()) for name, rows in found.items()}

    tenths, more = cut(0.1, 0.1), cut(0.1, 0.3)
    assert len(tenths["test"]) / 20_000 == pytest.approx(0.1, abs=0.006)
    assert len(tenths["val"]) / 20_000 == pytest.approx(0.1, abs=0.006)
    assert len(more["test"]) / 20_000 == pytest.approx(0.3, abs=0.01)
    assert more["val"] == tenths["val"]
    assert more["test"] > tenths["test"]
    # A folder test/ that comes later does not move the validation images.
    rest = {"train": np.arange(100, 20_000), "val": np.arange(0), "test": np.arange(100)}
    later = cut(0.1, 0.1, rest)
    assert later["test"] == set(range(100))
    assert later["val"] == {row for row in tenths["val"] if row >= 100}


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=12),
    st.floats(0.001, 0.999),
    st.floats(0.001, 0.999),
    st.sampled_from([(), ("val",), ("test",), ("val", "test")]),
)
def test_no_split_is_empty_and_none_overlap(
    values: list[int], val: float, test: float, official: tuple[str, ...]
) -> None:
    digests = np.array(values, dtype=np.uint64)
    rows = np.arange(len(values))
    given_rows = {"train": rows[len(official) :], "val": rows[:0], "test": rows[:0]}
    given_rows |= {name: rows[place : place + 1] for place, name in enumerate(official)}
    different = len(set(values[len(official) :]))
    try:
        found = cut_by_contents(Path(), given_rows, val, test, digests)
    except UserError as error:
        if "too few" in str(error):
            assert different <= 2 - len(official)
        else:
            assert val + test >= 1
            assert not official
        return
    assert different > 2 - len(official)
    assert sorted(np.concatenate(list(found.values())).tolist()) == rows.tolist()
    cut = [name for name in SPLIT_NAMES if name not in official]
    held = [{values[row] for row in found[name]} for name in cut]
    assert all(held)
    assert sum(map(len, held)) == different


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
    with pytest.raises(UserError, match=r"too few different images \(2\)"):
        opened(root)
    shutil.copy(root / "1.png", root / "copy.png")
    with pytest.raises(UserError, match=r"too few different images \(2\)"):
        opened(root)
    (root / "copy.png").unlink()
    with pytest.raises(UserError, match=r"too few images \(2\)"):
        opened(root, split_by="position")


def test_fractions_that_leave_nothing(tmp_path: Path) -> None:
    root = folder(tmp_path, *FLAT)
    with pytest.raises(UserError, match=r"val_fraction=0\.5 and dataset\.test_fraction=0\.5 leave"):
        opened(root, val_fraction=0.5, test_fraction=0.5)


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
    for name in ("a.heic", "in/b.HEIC", "README", ".hidden.heic"):
        (root / "in").mkdir(exist_ok=True)
        (root / name).touch()
    listing = list_folder(root)
    names = sorted(file.path for file in listing.files)
    assert names == ["0.png", "1.PNG", "2.jpg", "3.webp", "4.bmp", "5.gif", "6.tif"]
    assert listing.left_out == {".heic": 2, ".txt": 1, "": 1}
    assert opened(root).left_out == listing.left_out


@pytest.mark.parametrize("suffix", [".jfif", ".jpe", ".avif"])
def test_files_of_less_usual_kinds_are_read(tmp_path: Path, suffix: str) -> None:
    if suffix == ".avif" and not features.check("avif"):
        pytest.skip("this Pillow was built without AVIF")
    root = folder(tmp_path, "a.png", "b.png", "c.png")
    image = Image.new("RGB", (5, 4), (100, 100, 100))
    image.save(root / f"0{suffix.upper()}", format="AVIF" if suffix == ".avif" else "JPEG")
    found = all_levels(opened(root))
    assert found[:3] == [0, 1, 2]
    assert found[3] == pytest.approx(100, abs=2)


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
    first = opened(root)
    monkeypatch.setattr("imagegen.data.image_folder.read_image", None)
    monkeypatch.setattr("imagegen.data.image_folder.sha256_of", None)
    second = opened(root)
    for name in SPLIT_NAMES:
        assert levels(second, name) == levels(first, name)
        expected = image_digests(first.split(name).images)
        assert second.digests(name).tolist() == expected.tolist()


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
        ({"split_by": "name"}, "split_by=name is unknown; it can be contents or position"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, object], message: str) -> None:
    config = {"_target_": "imagegen.data.image_folder.ImageFolder", "root": str(tmp_path)}
    with pytest.raises(UserError, match=message):
        build({**config, **options}, ImageDataset)
