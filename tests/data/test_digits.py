import hashlib

import numpy as np
import pytest

from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.base import SPLIT_NAMES, data_folder, hold_out
from imagegen.data.digits import Digits


def test_splits_hold_every_image_once() -> None:
    from sklearn.datasets import load_digits

    digits = Digits()
    digits.prepare()
    splits = [digits.split(name) for name in SPLIT_NAMES]
    assert [len(split) for split in splits] == [1293, 144, 360]
    assert digits.spec == ImageSpec(8, 8, 1, 17)
    together = np.concatenate([split.images for split in splits])
    assert together.dtype == np.uint8
    assert together.max() == 16
    original = load_digits()
    rows = sorted(image.tobytes() for image in together)
    assert rows == sorted(image.astype(np.uint8).tobytes() for image in original.images)
    for split in splits:
        assert split.labels is not None
        assert split.labels.dtype == np.int64
        assert set(split.labels) == set(range(10))


def test_labels_belong_to_their_images() -> None:
    from sklearn.datasets import load_digits

    original = load_digits()
    label_of = {
        image.astype(np.uint8).tobytes(): label
        for image, label in zip(original.images, original.target, strict=True)
    }
    test = Digits().split("test")
    assert test.labels is not None
    for image, label in zip(test.images, test.labels, strict=True):
        assert label_of[image.tobytes()] == label


def test_the_split_never_changes() -> None:
    # Published bits/dim depend on these images; a changed digest makes them incomparable.
    digests = {
        name: hashlib.sha256(Digits().split(name).images.tobytes()).hexdigest()[:16]
        for name in SPLIT_NAMES
    }
    assert digests == {
        "train": "9dc9b50f3c0165dc",
        "val": "9af0ac7ac7f979e9",
        "test": "92bae1a6a5191552",
    }


def test_hold_out_is_a_fixed_choice() -> None:
    stays, held = hold_out(10, 3)
    assert sorted([*stays, *held]) == list(range(10))
    assert held.tolist() == [2, 4, 9]


def test_unknown_split() -> None:
    with pytest.raises(UserError, match="train, val, test"):
        Digits().split("validation")


def test_data_folder_does_not_depend_on_the_working_folder(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = data_folder()
    monkeypatch.chdir(str(tmp_path))
    assert data_folder() == before
    assert (before.parent / "imagegen" / "data" / "base.py").is_file()
