"""Models that learn labels: training, drawing a class, and classifying, through the commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train
from imagegen.checkpoint.reading import load_checkpoint
from imagegen.cli.entry import compose
from imagegen.core.errors import UserError
from imagegen.evaluation.scores import run as evaluate
from imagegen.generation.images import CAPTION_HEIGHT, make_grid, with_captions
from imagegen.generation.sample_options import labels_of
from tests.helpers import DRAWING, SMALL, manifest, read, read_images, sample, save_tiny_checkpoint

NAMES = ["cat", "dog", "7"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that a few steps have taught which of two classes is dark and which is bright."""
    folder = tmp_path_factory.mktemp("conditional")
    from PIL import Image

    generator = np.random.default_rng(0)
    for name, low in (("dark", 0), ("light", 200)):
        (folder / "photos" / name).mkdir(parents=True)
        for index in range(100):
            pixels = generator.integers(low, low + 50, (2, 2)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{index}.png")
    with pytest.MonkeyPatch.context() as patch:
        options = [option for option in DRAWING if "limit_train" not in option]
        options += ["dataset=image_folder", f"dataset.root={folder / 'photos'}", "dataset.size=2"]
        options += [
            "dataset.channels=1",
            f"dataset.cache={folder / 'cache'}",
            "trainer.max_epochs=20",
            "batch_size=8",
        ]
        options += ["model.conditional=true", "model.flips=true", "optimizer.lr=0.01"]
        options += ["trainer.check_val_every_n_epoch=10", f"hydra.run.dir={folder / 'run'}"]
        patch.setattr(sys, "argv", ["train.py", *options])
        train.main()
    return folder / "run"


def test_labels_are_learned_and_kept(trained: Path) -> None:
    loaded = load_checkpoint(trained)
    assert loaded.model.n_classes == 2
    assert loaded.metadata["class_names"] == ["dark", "light"]
    assert loaded.model.raster.tokens == "pixel"
    assert (trained / "samples").is_dir()


def test_a_class_is_drawn_by_its_name(trained: Path, tmp_path: Path) -> None:
    sample(trained, tmp_path / "a", "n=6", "label=[light,dark]", "temperature=0.5")
    brightness = [image.mean() for image in read_images(tmp_path / "a").values()]
    assert np.mean(brightness[::2]) > np.mean(brightness[1::2]) + 60
    assert manifest(tmp_path / "a")["labels"] == [1, 0]
    images = np.stack(list(read_images(tmp_path / "a").values()))
    expected = with_captions(make_grid(images, columns=2), ["light", "dark"])
    assert np.array_equal(read(tmp_path / "a" / "grid.png"), expected)
    sample(trained, tmp_path / "b", "n=2", "label=light", "guidance=2", "temperature=0.5")
    assert np.mean(list(read_images(tmp_path / "b").values())) > 128
    sample(trained, tmp_path / "c", "n=3", "label=all")
    assert manifest(tmp_path / "c")["labels"] == [0, 1]
    sample(trained, tmp_path / "d", "task=complete", "n=2", "label=1", "completions=2")
    assert manifest(tmp_path / "d")["labels"] == [1]


def test_likelihoods_classify(trained: Path, tmp_path: Path) -> None:
    def scored(*options: str) -> dict[str, Any]:
        return evaluate(compose("evaluate", [f"ckpt={trained}", *options]))

    out = tmp_path / "test.json"
    classified = scored("classify=true", "split=train", f"out={out}")
    assert classified["accuracy"] > 0.8  # chance: 0.5, with a deviation of 0.04
    assert json.loads(out.read_text())["given_labels"] is True
    told, untold = scored("split=train"), scored("split=train", "labels=false")
    assert told["bits_per_dim"] == pytest.approx(classified["bits_per_dim"], abs=1e-6)
    assert told["bits_per_dim"] < untold["bits_per_dim"]
    assert untold["given_labels"] is False


def test_classifying_needs_labels(tmp_path: Path) -> None:
    plain = save_tiny_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(UserError, match="classify=true needs a model trained with labels"):
        evaluate(compose("evaluate", [f"ckpt={plain}", "classify=true", "limit=2"]))


def test_conditional_needs_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.helpers import write_image

    for index in range(10):
        write_image(tmp_path / "photos" / f"{index}.png", (4, 4, 3), index)
    options = ["dataset=image_folder", f"dataset.root={tmp_path / 'photos'}", "dataset.size=4"]
    options += [f"dataset.cache={tmp_path / 'cache'}", "model.conditional=true"]
    monkeypatch.setattr(
        sys, "argv", ["train.py", *SMALL, *options, f"hydra.run.dir={tmp_path / 'run'}"]
    )
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 1
    assert "model.conditional=true needs labels" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_labels_as_they_are_typed() -> None:
    assert labels_of(None, NAMES, 3) is None
    assert labels_of("dog", NAMES, 3) == [1]
    # A name comes before a number.
    assert labels_of(7, NAMES, 3) == [2]
    assert labels_of([0, "cat", 2], NAMES, 3) == [0, 0, 2]
    assert labels_of("all", None, 3) == [0, 1, 2]
    for value, sentence in (
        ("bird", "label=bird is not one of this model's classes: cat, dog, 7"),
        (3, "label=3 is not one"),
        (-1, "label=-1 is not one"),
        (True, "label=true is not one"),
        ([], "label is an empty list"),
    ):
        with pytest.raises(UserError, match=sentence):
            labels_of(value, NAMES, 3)


def test_names_are_known_in_any_case_that_is_unambiguous() -> None:
    names = ["Sneaker", "bag", "Bag", "3D", "true", "all"]
    for typed in ("Sneaker", "sneaker", "SNEAKER", "sNeaker"):
        assert labels_of(typed, names, 6) == [0]
    # Names that differ in case alone are told apart; another case of them is neither.
    assert labels_of(["bag", "Bag", "3d", True, "All"], names, 6) == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match=r"label=BAG is not one of .*: .*, bag, Bag"):
        labels_of("BAG", names, 6)


def test_captions_stand_above_their_columns() -> None:
    grid = np.full((20, 90, 3), 7, np.uint8)
    captioned = with_captions(grid, ["a", "", "a very long name indeed"])
    assert captioned.shape == (20 + CAPTION_HEIGHT, 90, 3)
    assert np.array_equal(captioned[CAPTION_HEIGHT:], grid)
    strip = captioned[:CAPTION_HEIGHT, :, 0]
    dark = (strip < 100).any(axis=0)
    assert dark[:30].any()
    assert not dark[30:60].any()
    assert dark[60:].any()


def test_random_numbers_of_training_do_not_touch_evaluation() -> None:
    """Label dropout and flips act in training only."""
    from imagegen.core.spec import ImageSpec
    from tests.helpers import tiny_model

    model = tiny_model(ImageSpec(4, 4, 3), n_classes=2, flips=True).eval()
    images = torch.randint(0, 256, (3, 4, 4, 3), dtype=torch.uint8)
    labels = torch.tensor([0, 1, 1])
    assert torch.equal(model.bits_per_dim(images, labels), model.bits_per_dim(images, labels))
