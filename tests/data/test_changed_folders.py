"""Commands on a folder of images that has changed since training, or is seen from elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, features

from imagegen.checkpoint.export import export_safetensors
from imagegen.checkpoint.reading import load_checkpoint
from imagegen.cli.entry import compose
from imagegen.core.errors import UserError
from imagegen.data.image_folder import ImageFolder
from imagegen.evaluation.scores import run as run_evaluate
from imagegen.evaluation.scores import score_images
from tests.helpers import run_train

LAST = Path("checkpoints", "last.ckpt")
OPTIONS = [
    *("logger=none", "callbacks.grids=null", "trainer=cpu", "trainer.precision=32-true"),
    *("model.n_layers=1", "model.d_model=16", "model.d_ff=16", "model.n_heads=2"),
    *("head=categorical", "optimizer.lr=0.02", "scheduler=constant", "trainer.log_every_n_steps=1"),
    *("dataset=image_folder", "dataset.size=4", "dataset.channels=1", "batch_size=8"),
]


def write(path: Path, seed: int, low: int = 0) -> None:
    """A picture of 16 levels from `low` on; as .bmp the same bytes with every version of Pillow."""
    path.parent.mkdir(parents=True, exist_ok=True)
    levels = np.random.default_rng(seed).integers(low, low + 16, (4, 4))
    Image.fromarray(levels.astype(np.uint8)).save(path)


def write_classes(root: Path, **lows: int) -> Path:
    for place, (name, low) in enumerate(lows.items()):
        for number in range(24):
            write(root / name / f"{number:02}.bmp", seed=100 * low + place + number, low=low)
    return root


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> int:
        fresh = not any(argument.startswith("resume=") for argument in arguments)
        options = [*OPTIONS, f"dataset.cache={tmp_path / 'cache'}"] if fresh else []
        return run_train(monkeypatch, *options, *arguments)

    return command


def evaluate(run: Path, *overrides: str) -> dict[str, Any]:
    return run_evaluate(compose("evaluate", [f"ckpt={run / LAST}", *overrides]))


def class_names(run: Path) -> list[str]:
    names: list[str] = torch.load(run / LAST, weights_only=True)["imagegen"]["class_names"]
    return names


def test_a_file_more_leaves_the_test_split_and_its_score_alone(
    tmp_path: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(60):
        write(tmp_path / "photos" / f"{number:02}.bmp", seed=number)
    run = tmp_path / "run"
    assert train("dataset.root=photos", "trainer.max_epochs=2", f"hydra.run.dir={run}") == 0
    out = capsys.readouterr()
    assert "images: 50 train, 4 val, 6 test\n" in out.out
    assert "note: " not in out.err
    before = evaluate(run)
    assert (before["images"], before["images_trained_on"]) == (6, 0)

    write(tmp_path / "photos" / "00a.bmp", seed=60)
    (tmp_path / "photos" / "30.bmp").rename(tmp_path / "photos" / "z.bmp")
    after = evaluate(run)
    assert after["bits_per_dim"] == before["bits_per_dim"]
    assert after["images_trained_on"] == 0
    assert capsys.readouterr().err == ""
    assert train(f"resume={run}", "trainer.max_epochs=3") == 0
    out = capsys.readouterr()
    assert "train has 51 images (50 then), 1 of them new" in out.err
    assert "among those trained on" not in out.err
    assert evaluate(run)["images_trained_on"] == 0
    assert capsys.readouterr().err == ""


def test_test_images_that_were_trained_on_are_counted(
    tmp_path: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    photos = tmp_path / "photos"
    for number in range(30):
        split = ("train", "val", "test")[number % 3]
        write(photos / split / f"{number:02}.bmp", seed=number)
    run = tmp_path / "run"
    assert train("dataset.root=photos", "trainer.max_epochs=1", f"hydra.run.dir={run}") == 0
    assert "note: " not in capsys.readouterr().err
    evaluate(run)
    assert capsys.readouterr().err == ""

    # As another file of another format, in another folder.
    with Image.open(photos / "train" / "00.bmp") as image:
        image.save(photos / "test" / "zz.png")
    assert evaluate(run)["images_trained_on"] == 1
    assert capsys.readouterr().err == (
        "note: the data differ from those of the checkpoint: test has 11 images (10 then)\n"
        "note: the checkpoint was trained on 1 of these 11 test images, so the result says little "
        "about new ones\n"
    )
    assert evaluate(run, "limit=10")["images_trained_on"] == 0

    # What was once trained on stays so, also where the run no longer sees it.
    (photos / "train" / "00.bmp").rename(photos / "val" / "00.bmp")
    shutil.copy(photos / "test" / "02.bmp", photos / "train")
    assert train(f"resume={run}", "trainer.max_epochs=2") == 0
    error = capsys.readouterr().err
    assert "note: 1 of 11 val images are among those trained on\n" in error
    assert "note: 2 of 11 test images are among those trained on\n" in error
    assert evaluate(run)["images_trained_on"] == 2


def test_classes_are_matched_by_name(
    tmp_path: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    write_classes(tmp_path / "abc", a=0, b=100, c=200)
    write_classes(tmp_path / "bc", b=100, c=200)
    write_classes(tmp_path / "bcd", b=100, c=200, d=50)
    run = tmp_path / "run"
    options = ("model.conditional=true", "trainer.max_epochs=12", f"hydra.run.dir={run}")
    assert train("dataset.root=abc", *options) == 0
    assert class_names(run) == ["a", "b", "c"]
    assert evaluate(run, "classify=true")["accuracy"] == 1

    # The second and the third class are the first and the second of this folder.
    some = evaluate(run, "classify=true", "dataset.root=bc")
    assert some["accuracy"] == 1
    split = ImageFolder("bc", 4, 1, cache="cache", split_by="contents").split("test")
    scores = score_images(load_checkpoint(run / LAST).model, split.images, labels=split.labels + 1)
    assert some["bits_per_dim"] == pytest.approx(scores.mean(), rel=1e-6)
    unknown = r"does not know the class d of data set image_folder; it knows a, b, c; rename or"
    for options in (("classify=true",), ()):
        with pytest.raises(UserError, match=unknown):
            evaluate(run, "dataset.root=bcd", *options)
    assert evaluate(run, "dataset.root=bcd", "labels=false")["given_labels"] is False

    content = (run / LAST).read_bytes()
    capsys.readouterr()
    assert train(f"resume={run}", "trainer.max_epochs=13", f"dataset.root={tmp_path / 'bcd'}") == 1
    assert "does not know the class d" in capsys.readouterr().err
    assert (run / LAST).read_bytes() == content
    assert train(f"resume={run}", "trainer.max_epochs=13", f"dataset.root={tmp_path / 'bc'}") == 0
    assert class_names(run) == ["a", "b", "c"]
    assert evaluate(run, "classify=true", "dataset.root=abc")["accuracy"] == 1


def test_exported_weights_know_their_classes_by_name(
    tmp_path: Path, train: Callable[..., int]
) -> None:
    write_classes(tmp_path / "ab", a=0, b=100)
    write_classes(tmp_path / "b", b=100)
    run = tmp_path / "run"
    options = ("model.conditional=true", "trainer.max_epochs=1", f"hydra.run.dir={run}")
    assert train("dataset.root=ab", *options) == 0
    export_safetensors(run, tmp_path / "weights")
    result = run_evaluate(
        compose("evaluate", [f"ckpt={tmp_path / 'weights'}", f"dataset.root={tmp_path / 'b'}"])
    )
    expected = run_evaluate(compose("evaluate", [f"ckpt={run}", f"dataset.root={tmp_path / 'b'}"]))
    assert result["bits_per_dim"] == expected["bits_per_dim"]


def test_other_labels_and_classes_matter_only_to_models_that_know_them(
    tmp_path: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for conditional in ("true", "false"):
        root, run = tmp_path / f"photos-{conditional}", tmp_path / f"run-{conditional}"
        write_classes(root, a=0, b=100)
        options = ("trainer.max_epochs=1", f"hydra.run.dir={run}")
        assert train(f"dataset.root={root}", f"model.conditional={conditional}", *options) == 0
        for number in range(24):
            (root / "b" / f"{number:02}.bmp").rename(root / "a" / f"b{number:02}.bmp")
        (root / "b").rmdir()
        evaluate(run)
        said = "test has the same images with other labels" in capsys.readouterr().err
        assert said == (conditional == "true")
    write_classes(root, c=200)
    assert train(f"resume={run}", "trainer.max_epochs=2") == 0
    assert class_names(run) == ["a", "c"]


def test_a_relative_folder_is_found_from_another_working_directory(
    tmp_path: Path,
    train: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for number in range(20):
        write(first / "photos" / f"{number:02}.bmp", seed=number)
    second.mkdir()
    run = tmp_path / "run"
    monkeypatch.chdir(first)
    options = ("trainer.max_epochs=1", f"hydra.run.dir={run}", "dataset.cache=cache")
    assert train("dataset.root=photos", *options) == 0
    counts = next(line for line in capsys.readouterr().out.splitlines() if "images: " in line)
    monkeypatch.chdir(second)
    assert train(f"resume={run}", "trainer.max_epochs=2") == 0
    assert "dataset." not in capsys.readouterr().out  # nobody has changed it
    assert list(second.iterdir()) == []

    for number in range(35):  # others, under the same name
        write(second / "photos" / f"{number:02}.bmp", seed=100 + number)
    capsys.readouterr()
    assert train(f"resume={run}", "trainer.max_epochs=3") == 0
    out = capsys.readouterr()
    assert counts in out.out
    assert "note: " not in out.err
    assert [path.name for path in second.iterdir()] == ["photos"]

    shutil.move(first, tmp_path / "moved")
    assert train(f"resume={run}", "trainer.max_epochs=4") == 1
    assert f"dataset.root={first / 'photos'} is not a folder; give the" in capsys.readouterr().err
    now = f"dataset.root={tmp_path / 'moved' / 'photos'}"
    assert train(f"resume={run}", "trainer.max_epochs=4", now) == 0
    out = capsys.readouterr()
    assert counts in out.out
    assert "note: " not in out.err
    # What is typed now is relative to where it is typed.
    assert train(f"resume={run}", "trainer.max_epochs=5", "dataset.root=photos") == 0
    assert "the data differ from those of the checkpoint: train has" in capsys.readouterr().err


def test_what_is_left_out_is_named(
    tmp_path: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    photos = tmp_path / "photos"
    for number in range(10):
        write(photos / f"{number:02}.bmp", seed=number)
    for number in range(10, 15):
        write(photos / f"{number:02}.jpg", seed=number)
        (photos / f"{number:02}.jpg").rename(photos / f"{number:02}.jfif")
    if features.check("avif"):
        write(photos / "15.avif", seed=15)
    for number in range(26):
        (photos / f"{number}.heic").touch()
    (photos / "notes.txt").touch()
    options = ("trainer.max_epochs=1", f"hydra.run.dir={tmp_path / 'run'}")
    assert train("dataset.root=photos", *options) == 0
    out = capsys.readouterr().out
    assert "; left out: 26 files .heic, 1 file .txt\n" in out
    (line,) = (line for line in out.splitlines() if line.startswith("images: "))
    counts = [int(word) for word in line.split(";")[0].split() if word.isdigit()]
    assert sum(counts) == 15 + features.check("avif")


def as_of_version_0_1(run: Path) -> None:
    """Take from a checkpoint, split by position, what earlier versions did not write."""
    path = run / LAST
    content = torch.load(path, weights_only=True)
    ours = content["imagegen"]
    del ours["data"]
    for options in (ours["dataset"], ours["config"]["dataset"]):
        del options["split_by"]
    ours["overrides"] = [text for text in ours["overrides"] if "split_by" not in text]
    torch.save(content, path)


def test_runs_of_earlier_versions_keep_their_split(
    tmp_path: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(50):
        write(tmp_path / "photos" / f"{number:02}.bmp", seed=number)
    run = tmp_path / "run"
    options = ("trainer.max_epochs=1", f"hydra.run.dir={run}", "dataset.split_by=position")
    assert train("dataset.root=photos", *options) == 0
    expected = evaluate(run)
    as_of_version_0_1(run)
    capsys.readouterr()
    found = evaluate(run)
    assert found["bits_per_dim"] == expected["bits_per_dim"]
    assert found["images_trained_on"] is None
    unknown = "of an earlier version, does not say which images it was trained on"
    assert unknown in capsys.readouterr().err

    assert train(f"resume={run}", "trainer.max_epochs=2", "dataset.split_by=contents") == 1
    assert "would move images" in capsys.readouterr().err
    assert train(f"resume={run}", "trainer.max_epochs=2") == 0
    out = capsys.readouterr()
    assert unknown in out.err
    assert "images: 40 train, 5 val, 5 test\n" in out.out
    ours = torch.load(run / LAST, weights_only=True)["imagegen"]
    assert ours["dataset"]["split_by"] == "position"
    assert evaluate(run)["images_trained_on"] == 0
    assert capsys.readouterr().err == ""

    # One file more, and training images are in the test split; now this is seen.
    write(tmp_path / "photos" / "00a.bmp", seed=50)
    trained_on = evaluate(run)["images_trained_on"]
    assert trained_on > 0
    error = capsys.readouterr().err
    assert f"trained on at least {trained_on} of these 5 test images" in error
    assert json.loads(json.dumps(evaluate(run)))["images_trained_on"] == trained_on


def test_begun_or_continued_by_one_command(tmp_path: Path, train: Callable[..., int]) -> None:
    for number in range(50):
        write(tmp_path / "photos" / f"{number:02}.bmp", seed=number)
    run = tmp_path / "run"
    command = [*OPTIONS, "dataset.root=photos", "resume=auto", f"hydra.run.dir={run}"]
    assert train(*command, "trainer.max_epochs=1", "dataset.split_by=position") == 0
    as_of_version_0_1(run)
    assert train(*command, "trainer.max_epochs=2", f"dataset.cache={tmp_path / 'cache'}") == 0
    ours = torch.load(run / LAST, weights_only=True)["imagegen"]
    assert ours["dataset"]["split_by"] == "position"
