"""`sample.py`: new images, what is left on disk, and what is refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import imagegen
from imagegen.cli.entry import PROJECT_ROOT, compose
from imagegen.core.errors import UserError
from imagegen.core.machine import describe
from imagegen.generation import sampling_loop as generation
from imagegen.generation.images import make_grid, to_display
from imagegen.generation.job import run
from tests.helpers import (
    manifest,
    read,
    read_images,
    sample,
    save_tiny_checkpoint,
    tree,
)


def test_writes_images_grid_and_manifest(
    grey: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drawn"
    sample(grey, out, "n=5", "seed=3", "temperature=0.5", "batch_size=2")
    images = read_images(out)
    assert list(images) == [f"{i:05d}.png" for i in range(5)]
    assert all(image.shape == (8, 8, 1) for image in images.values())
    np.testing.assert_array_equal(
        read(out / "grid.png"), make_grid(np.stack(list(images.values())))
    )
    told = manifest(out)
    assert told.pop("images_per_second") > 0
    assert told.pop("seconds") > 0
    assert told.pop("created").startswith("20")
    assert told.pop("machine") == describe(torch.device("cpu"))
    assert told == {
        "task": "sample",
        "checkpoint": str(grey),
        "checkpoint_sha256": hashlib.sha256(grey.read_bytes()).hexdigest(),
        "seed": 3,
        "temperature": 0.5,
        "mixture_temperature": None,
        "scale_temperature": None,
        "top_p": 1.0,
        "guidance": 1.0,
        "labels": None,
        "n": 5,
        "batch_size": 2,
        "image_shape": [8, 8, 1],
        "levels": 17,
        "device": "cpu",
        "loop": "torch",
        "grid": {"images": 5},
        "state": "finished",
        "imagegen_version": imagegen.__version__,
        "torch_version": torch.__version__,
    }
    assert tree(tmp_path) == {"drawn", "drawn/images", "drawn/grid.png", "drawn/manifest.json"} | {
        f"drawn/images/{name}" for name in images
    }
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "5 images in" in printed.out
    assert "images/s" in printed.out
    assert str(out) in printed.out


def test_values_are_levels_stretched_to_the_full_range(grey: Path, tmp_path: Path) -> None:
    sample(grey, tmp_path / "out", "n=8")
    shades = set(to_display(np.arange(17, dtype=np.uint8), 17).tolist())
    for image in read_images(tmp_path / "out").values():
        assert set(image.ravel().tolist()) <= shades


@pytest.mark.parametrize("checkpoint", ["grey", "colour"])
def test_an_image_does_not_depend_on_the_others(
    checkpoint: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    ckpt = request.getfixturevalue(checkpoint)
    sample(ckpt, tmp_path / "many", "n=20", "seed=7")
    many = read_images(tmp_path / "many")
    assert len({image.tobytes() for image in many.values()}) == 20
    for n, batch_size in [(20, 3), (20, 1), (1, 64), (17, 16)]:
        out = tmp_path / f"{n}-{batch_size}"
        sample(ckpt, out, f"n={n}", f"batch_size={batch_size}", "seed=7")
        few = read_images(out)
        assert len(few) == n
        for name, image in few.items():
            np.testing.assert_array_equal(image, many[name])
    sample(ckpt, tmp_path / "other", "n=1", "seed=8")
    assert (read_images(tmp_path / "other")["00000.png"] != many["00000.png"]).any()


def test_greedy_draws_the_same_whatever_the_seed(grey: Path, tmp_path: Path) -> None:
    sample(grey, tmp_path / "a", "n=2", "seed=1", "temperature=0")
    sample(grey, tmp_path / "b", "n=2", "seed=2", "temperature=0.0")
    images = [*read_images(tmp_path / "a").values(), *read_images(tmp_path / "b").values()]
    for image in images:
        np.testing.assert_array_equal(image, images[0])


def test_a_large_grid_shows_the_first_images(
    grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imagegen.generation.images.GRID_TILES", 3)
    sample(grey, tmp_path / "out", "n=5")
    assert manifest(tmp_path / "out")["grid"] == {"images": 3}
    images = list(read_images(tmp_path / "out").values())
    assert len(images) == 5
    np.testing.assert_array_equal(read(tmp_path / "out/grid.png"), make_grid(np.stack(images[:3])))


def test_an_earlier_result_is_replaced(grey: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sample(grey, out, "n=4", "seed=1")
    sample(grey, out, "task=complete", "n=1", "completions=1")
    assert list(read_images(out)) == ["00000-1.png", "00000-original.png"]
    sample(grey, out, "n=2", "seed=2")
    assert list(read_images(out)) == ["00000.png", "00001.png"]
    assert manifest(out)["seed"] == 2


@pytest.mark.parametrize("own", ["images/holiday.jpg", "notes.txt", "images/00000.png"])
def test_files_of_others_are_never_replaced(grey: Path, tmp_path: Path, own: str) -> None:
    out = tmp_path / "out"
    (out / own).parent.mkdir(parents=True)
    (out / own).write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(UserError, match=r"out=.*out holds files that .* did not write"):
        sample(grey, out, "n=1")
    assert tree(tmp_path) == before
    assert (out / own).read_text() == "mine"


@pytest.mark.parametrize("command", ["python sample.py", "imagegen sample"])
def test_messages_name_the_command_as_typed(
    command: str, grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [command.removeprefix("python "), "n=1"])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=f"holds files that {command} did not write"):
        sample(grey, tmp_path, "n=1")
    foreign = command.replace("sample", "train")
    with pytest.raises(UserError, match=f"not a checkpoint of imagegen; .* that {foreign} wrote"):
        sample(tmp_path / "notes.txt", tmp_path / "out", "n=1")


def test_default_folder_is_named_by_the_time(
    grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = run(compose("sample", [f"ckpt={grey}", "n=1"]))
    assert out.parent == tmp_path / "samples"
    assert "=" not in out.name
    assert (out / "grid.png").is_file()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["n=0"], "n=0, but it must be a whole number of at least 1"),
        (["n=-3"], "n=-3, but"),
        (["n=2.5"], "n=2.5, but"),
        (["n=many"], "n=many, but"),
        (["batch_size=0"], "batch_size=0, but it must be a whole number of at least 1"),
        (["seed=-1"], "seed=-1, but it must be a whole number from 0 to"),
        (["temperature=-0.5"], "temperature=-0.5, but it must be a number of 0"),
        (["temperature=nan"], "temperature=nan, but"),
        (["temperature=inf"], "temperature=inf, but"),
        (["temperature=warm"], "temperature=warm, but"),
        (["scale_temperature=-1"], "scale_temperature=-1, but it must be a number of 0"),
        (["top_p=0"], "top_p=0.0 must be above 0"),
        (["top_p=most"], "top_p=most, but it must be a number, above 0"),
        (["guidance=null"], "guidance=null, but it must be a number"),
        (["guidance=2"], "guidance=2.0 needs labels to guide towards; add label="),
        (["label=3"], "label=3, but this model was trained without labels"),
        (["task=draw"], "task=draw is unknown; it can be sample, complete"),
        (["device=tpu"], "device=tpu is unknown; it can be auto, cpu, cuda"),
        (["device=cuda:99"], "device=cuda:99, but PyTorch finds"),
        (["images=x.png"], "images is not used by task=sample; add task=complete"),
        (["completions=2"], "completions is not used by task=sample"),
        (["ckpt=null"], "ckpt is missing; add ckpt="),
        (["ckpt=nowhere.ckpt"], "nowhere.ckpt"),
        (["out=''"], "out is empty"),
    ],
)
def test_refusals_leave_nothing(
    grey: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence) as refusal:
        sample(grey, tmp_path / "below" / "out", *overrides)
    assert "\n" not in str(refusal.value)
    assert not tree(tmp_path)


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda p: p.write_bytes(b""), "in.ckpt"),
        (lambda p: p.write_bytes(b"not a checkpoint at all"), "in.ckpt"),
        (lambda p: torch.save({"state_dict": {}}, p), "in.ckpt"),
        (lambda p: p.mkdir(), "in.ckpt"),
    ],
    ids=["empty", "text", "foreign", "folder"],
)
def test_other_checkpoints_are_refused(tmp_path: Path, write: Any, sentence: str) -> None:
    write(tmp_path / "in.ckpt")
    with pytest.raises(UserError, match=sentence):
        sample(tmp_path / "in.ckpt", tmp_path / "out")
    assert tree(tmp_path) == {"in.ckpt"}


def test_truncated_checkpoints_are_refused(grey: Path, tmp_path: Path) -> None:
    content = grey.read_bytes()
    for length in (100, len(content) // 2, len(content) - 10):
        (tmp_path / "in.ckpt").write_bytes(content[:length])
        with pytest.raises(UserError, match=r"in\.ckpt"):
            sample(tmp_path / "in.ckpt", tmp_path / "out")
    assert tree(tmp_path) == {"in.ckpt"}


def test_a_folder_that_cannot_be_written_is_refused_before_drawing(
    grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("drew before looking at out")

    monkeypatch.setattr(generation, "draw_images", refuse)
    monkeypatch.setattr(generation, "draw_completions", refuse)
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        for task in ("task=sample", "task=complete"):
            with pytest.raises(UserError, match=str(out)):
                sample(grey, out, task)
    assert tree(tmp_path) == {"file"}
    assert (tmp_path / "file").read_text() == "mine"


def test_a_checkpoint_replaced_while_it_is_read_is_refused(
    grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = tmp_path / "last.ckpt"
    ckpt.write_bytes(grey.read_bytes())
    from imagegen.checkpoint import reading as checkpoint

    load = checkpoint.load_checkpoint

    def load_late(*args: Any, **kwargs: Any) -> Any:
        os.replace(save_tiny_checkpoint(tmp_path / "new.ckpt", seed=1), ckpt)
        return load(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "load_checkpoint", load_late)
    with pytest.raises(UserError, match=r"last\.ckpt was replaced while it was being read"):
        sample(ckpt, tmp_path / "out", "n=1")


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROJECT_ROOT / "sample.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_command_leaves_only_what_was_asked_for(grey: Path, tmp_path: Path) -> None:
    done = command(f"ckpt={grey}", "n=2", "out=here/out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    how, result, look = done.stdout.splitlines()
    assert how == "drawing on cpu with PyTorch's operations"  # so few pixels, see decode.SHORTEST
    assert result.startswith("2 images in ")
    assert look == f"look at {tmp_path / 'here/out/grid.png'}"
    assert tree(tmp_path) == {"here"} | {
        f"here/out{name}"
        for name in (
            "", "/grid.png", "/manifest.json", "/images", "/images/00000.png", "/images/00001.png"
        )
    }  # fmt: skip


def test_command_answers_a_mistake_in_one_line(grey: Path, tmp_path: Path) -> None:
    done = command(f"ckpt={grey}", "n=0", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: n=0, but it must be a whole number of at least 1.\n"
    assert done.stdout == ""
    assert not tree(tmp_path)


def test_help_names_every_option(tmp_path: Path) -> None:
    done = command("--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in compose("sample"):
        assert str(name) in done.stdout
    assert not tree(tmp_path)
