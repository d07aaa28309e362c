"""What a checkpoint keeps about its data, and how those of today are compared with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from imagegen.checkpoint.reading import read_metadata
from imagegen.checkpoint.training_data import (
    Relabelled,
    build_dataset,
    class_numbers,
    count_trained_on,
    remember,
    resume_overrides,
)
from imagegen.cli.entry import compose
from imagegen.cli.resume import rewrite_resume
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.base import ImageDataset, ImageSplit, image_digests
from imagegen.data.digits import Digits
from imagegen.evaluation.scores import run as evaluate
from tests.helpers import DIGITS, save_tiny_checkpoint

FOLDER = "imagegen.data.image_folder.ImageFolder"


class Squares(ImageDataset):
    """One image of 2x2 a number; numbers are also the labels where there are class names."""

    name = "squares"
    class_names: tuple[str, ...] | None = None

    def __init__(
        self,
        train: list[int],
        val: list[int],
        test: list[int],
        names: tuple[str, ...] | None = None,
    ) -> None:
        self.spec = ImageSpec(2, 2, 1, 256)
        self.numbers = {"train": train, "val": val, "test": test}
        self.class_names = names

    def split(self, which: str) -> ImageSplit:
        levels = np.array(self.numbers[which], dtype=np.uint8)
        images = np.broadcast_to(levels[:, None, None, None], (len(levels), 2, 2, 1)).copy()
        return ImageSplit(images, None if self.class_names is None else levels.astype(np.int64))


def metadata_of(
    data: dict[str, Any] | None, classes: int | None = None, names: list[str] | None = None
) -> dict[str, Any]:
    return {"model": {"n_classes": classes}, "dataset": {}, "data": data, "class_names": names}


def test_digests_tell_images_apart_and_nothing_else() -> None:
    images = np.random.default_rng(0).integers(0, 3, (500, 2, 2, 1)).astype(np.uint8)
    digests = image_digests(images)
    assert digests.shape == (500,)
    assert digests.dtype == np.int64
    assert len(np.unique(digests)) == len(np.unique(images.reshape(500, 4), axis=0)) == 81
    assert np.array_equal(image_digests(images[::-1])[::-1], digests)
    # Checkpoints keep them, so they stay what they are.
    assert image_digests(np.zeros((1, 2, 2, 1), np.uint8)).tolist() == [-7059167771142159282]


def test_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    kept = remember(Squares([3, 1, 2, 1], [4], [5, 6]), None)
    assert [kept["splits"][name]["images"] for name in ("train", "val", "test")] == [4, 1, 2]
    assert kept["trained_on"].dtype == torch.int64
    assert len(kept["trained_on"]) == 3
    assert kept["complete"] is True
    again = remember(Squares([1, 1, 2, 3], [4], [6, 5]), None)
    assert again["splits"] == kept["splits"]
    assert capsys.readouterr().err == ""
    remember(Squares([3, 1, 2], [4], [1, 2, 6]), None)
    assert capsys.readouterr().err == "note: 2 of 3 test images are among those trained on\n"


def test_eight_bytes_an_image() -> None:
    kept = remember(Digits(), None)
    assert kept["trained_on"].numpy().nbytes == 8 * 1293


@pytest.mark.parametrize(
    ("now", "count", "said"),
    [
        (Squares([1, 2, 3], [4], [6, 5]), 0, ""),
        (
            Squares([1, 2], [4], [5, 6, 3]),
            1,
            "note: the data differ from those of the checkpoint: test has 3 images (2 then)\n"
            "note: the checkpoint was trained on 1 of these 3 test images, so the result says "
            "little about new ones\n",
        ),
        (
            Squares([1, 2], [4], [5, 7]),
            0,
            "note: the data differ from those of the checkpoint: test has 2 images (as many "
            "then)\n",
        ),
    ],
)
def test_what_evaluate_says(
    now: Squares, count: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = metadata_of(remember(Squares([1, 2, 3], [4], [5, 6]), None))
    assert count_trained_on(metadata, now, "test", 99) == count
    assert capsys.readouterr().err == said


def test_labels_are_compared_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    kept = remember(Squares([0], [1], [1, 2], ("a", "b", "c")), None)
    for classes in (None, 3):
        metadata = metadata_of(kept, classes, ["a", "b", "c"])
        # Without a, the others have other numbers.
        fewer = Relabelled(Squares([0], [1], [1, 2], ("b", "c", "d")), np.array([1, 2, 3]), None)
        assert count_trained_on(metadata, fewer.dataset, "test", 2) == 0
        other = capsys.readouterr().err
        assert ("test has the same images with other labels" in other) == (classes == 3)


def test_classes_by_name() -> None:
    three = metadata_of(None, 3, ["a", "b", "c"])
    assert class_numbers(three, Squares([], [], [], ("c", "b"))).tolist() == [2, 1]
    relabelled = Relabelled(Squares([0, 1], [1], [], ("b", "c")), np.array([1, 2]), ("a", "b", "c"))
    assert relabelled.class_names == ("a", "b", "c")
    assert relabelled.split("train").labels.tolist() == [1, 2]
    # A checkpoint without names can only mean the order.
    unnamed = metadata_of(None, 2)
    assert class_numbers(unnamed, Squares([], [], [], ("x", "y"))).tolist() == [0, 1]
    for metadata, names, sentence in (
        (three, ("b", "x", "y"), "know the classes x, y of data set squares; it knows a, b, c; "),
        (three, None, "has no labels, but the checkpoint's model was trained with them"),
        (
            unnamed,
            ("x",),
            "classes is 1 in data set squares and 2 in the checkpoint, which does not name",
        ),
        (metadata_of(None, 3, ["a"]), ("a",), "damaged: it has no names for its 3 classes"),
        (metadata_of(None, 1, [["a"]]), ("a",), "damaged: it has no names for its 1 classes"),
    ):
        with pytest.raises(UserError, match=sentence):
            class_numbers(metadata, Squares([], [], [], names))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: 3,
        lambda data: [],
        lambda data: {**data, "splits": {}},
        lambda data: {**data, "splits": {**data["splits"], "test": 3}},
        lambda data: {**data, "splits": {**data["splits"], "test": {"images": "2"}}},
        lambda data: {**data, "trained_on": [1, 2]},
        lambda data: {**data, "trained_on": data["trained_on"].float()},
        lambda data: {**data, "trained_on": torch.zeros(1, dtype=torch.int64).expand(10**12)},
        lambda data: {**data, "complete": None},
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, change: Any) -> None:
    path = save_tiny_checkpoint(tmp_path / "tiny.ckpt")
    content = torch.load(path, weights_only=True)
    content["imagegen"]["data"] = remember(Digits(), None)
    torch.save(content, path)
    assert evaluate(compose("evaluate", [f"ckpt={path}", "limit=2"]))["images_trained_on"] == 0
    content["imagegen"]["data"] = change(content["imagegen"]["data"])
    torch.save(content, path)
    with pytest.raises(UserError, match="damaged: what it says of its data cannot be read"):
        evaluate(compose("evaluate", [f"ckpt={path}", "limit=2"]))


def test_a_new_run_is_built_as_it_says() -> None:
    assert isinstance(build_dataset(DIGITS, None), Digits)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ({"root": "photos", "cache": None}, {"dataset.root": "/x/photos"}),
        ({"root": "../a", "cache": "c"}, {"dataset.root": "/x/photos", "dataset.cache": "/x/c"}),
        # These mean the same everywhere, or what they mean here is what is wanted.
        ({"root": "/x/photos", "cache": None}, {}),
        ({"root": "~/photos", "cache": None}, {}),
        ({}, {}),
    ],
)
def test_relative_folders_become_absolute(typed: dict[str, Any], expected: dict[str, str]) -> None:
    kept = {"_target_": FOLDER, "root": "/x/photos", "cache": "/x/c"}
    metadata = {"dataset": kept, "config": {"dataset": typed}}
    assert resume_overrides(metadata) == expected
    for damaged in ({}, {"dataset": 3}, {"dataset": kept}, {"dataset": kept, "config": []}):
        assert resume_overrides(damaged) == {}


@pytest.mark.parametrize(
    ("saved", "typed", "expected"),
    [
        (["dataset=mnist", "dataset.root=d"], [], ["dataset=mnist", "dataset.root='/x/d'"]),
        # From a preset.
        (["experiment=mine"], [], ["experiment=mine", "dataset.root='/x/d'"]),
        (["dataset.root=d"], ["dataset.root=here"], ["dataset.root=here"]),
        (["dataset=mnist", "dataset.root=d"], ["dataset=fashion_mnist"], ["dataset.root='/x/d'"]),
        (["experiment=mine"], ["dataset=digits"], ["experiment=mine"]),
    ],
)
def test_resume_says_where_the_data_are(
    tmp_path: Path, saved: list[str], typed: list[str], expected: list[str]
) -> None:
    path = save_tiny_checkpoint(tmp_path / "tiny.ckpt")
    content = torch.load(path, weights_only=True)
    content["imagegen"]["overrides"] = saved
    content["imagegen"]["dataset"] = {"_target_": "imagegen.data.mnist.MNIST", "root": "/x/d"}
    content["imagegen"]["config"] = {"dataset": {"root": "d"}}
    torch.save(content, path)
    assert read_metadata(path)["overrides"] == saved
    found = rewrite_resume([f"resume={path}", *typed])
    rest = [text for text in found if not text.startswith("resume=") and text not in typed]
    assert rest == [text for text in expected if text not in typed]
    assert set(rewrite_resume(found)) == set(found)
