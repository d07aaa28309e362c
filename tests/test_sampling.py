"""`sample.py`: new images and completions, what they leave on disk, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import imagegen
from imagegen import generate as generation
from imagegen.cli import PROJECT_ROOT, compose
from imagegen.data.digits import Digits
from imagegen.errors import UserError
from imagegen.images import from_display, make_completion_grid, make_grid, to_display
from imagegen.sampling import run
from tests.helpers import save_tiny_checkpoint


@pytest.fixture(scope="module")
def grey(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of an untrained model of digits: 8x8, 1 channel, 17 levels."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("grey") / "tiny.ckpt")


@pytest.fixture(scope="module")
def colour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of an untrained model of images of 4x6, 3 channels, 256 levels."""
    folder = tmp_path_factory.mktemp("colour")
    for i in range(10):
        write_image(folder / "photos" / f"{i}.png", (4, 6, 3), seed=i)
    dataset = {
        "_target_": "imagegen.data.image_folder.ImageFolder",
        "root": str(folder / "photos"),
        "size": [4, 6],
        "channels": 3,
        "cache": str(folder / "cache"),
    }
    return save_tiny_checkpoint(folder / "tiny.ckpt", dataset=dataset)


def write_image(path: Path, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """A random image, as written."""
    image = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return image


def sample(ckpt: Path, out: Path, *overrides: str) -> Path:
    return run(compose("sample", [f"ckpt={ckpt}", f"out={out}", *overrides]))


def read(path: Path) -> np.ndarray:
    """A PNG as "h w c"."""
    with Image.open(path) as image:
        array = np.array(image)
    return array[..., None] if array.ndim == 2 else array


def read_images(out: Path) -> dict[str, np.ndarray]:
    return {path.name: read(path) for path in sorted((out / "images").iterdir())}


def manifest(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return found


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


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
    assert told == {
        "task": "sample",
        "checkpoint": str(grey),
        "checkpoint_sha256": hashlib.sha256(grey.read_bytes()).hexdigest(),
        "seed": 3,
        "temperature": 0.5,
        "n": 5,
        "batch_size": 2,
        "image_shape": [8, 8, 1],
        "levels": 17,
        "device": "cpu",
        "grid": {"images": 5},
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
    monkeypatch.setattr("imagegen.images.GRID_TILES", 3)
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
    with pytest.raises(UserError, match=r"out=.*out holds files that sample.py did not write"):
        sample(grey, out, "n=1")
    assert tree(tmp_path) == before
    assert (out / own).read_text() == "mine"


def test_default_folder_is_named_by_the_time(
    grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = run(compose("sample", [f"ckpt={grey}", "n=1"]))
    assert out.parent == tmp_path / "samples"
    assert "=" not in out.name
    assert (out / "grid.png").is_file()


def test_completes_the_test_split(
    grey: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    sample(grey, out, "task=complete", "n=3", "visible=[0,0.5,0.9]", "completions=2")
    originals = Digits().split("test").images[:3]
    told = manifest(out)
    assert (told["n"], told["completions"], told["task"]) == (3, 2, "complete")
    assert told["grid"] == {"images": 3, "completions": 2}
    assert [entry["source"] for entry in told["images"]] == [f"digits/test/{i}" for i in range(3)]
    assert [entry["visible_rows"] for entry in told["images"]] == [0, 4, 7]
    drawn = []
    for entry, original in zip(told["images"], originals, strict=True):
        np.testing.assert_array_equal(read(out / entry["original"]), to_display(original, 17))
        completions = [read(out / name) for name in entry["completions"]]
        rows = entry["visible_rows"]
        for completion in completions:
            np.testing.assert_array_equal(
                from_display(completion, 17)[:rows], original[:rows], strict=True
            )
        assert (completions[0] != completions[1]).any()
        drawn.append(completions)
    np.testing.assert_array_equal(
        read(out / "grid.png"),
        make_completion_grid(to_display(originals, 17), np.array(drawn), [0, 4, 7]),
    )
    assert set(read_images(out)) == {
        f"{i:05d}-{what}.png" for i in range(3) for what in ("original", "1", "2")
    }
    assert "6 completions of 3 images" in capsys.readouterr().out


def test_defaults_of_completion(grey: Path, tmp_path: Path) -> None:
    sample(grey, tmp_path / "out", "task=complete")
    told = manifest(tmp_path / "out")
    assert (told["n"], told["completions"]) == (8, 4)
    assert {entry["visible_rows"] for entry in told["images"]} == {4}
    sample(grey, tmp_path / "greedy", "task=complete", "visible_rows=[1,2,3]", "temperature=0")
    told = manifest(tmp_path / "greedy")
    # A list asks for as many images; greedy completions of one image would all be the same.
    assert (told["n"], told["completions"]) == (3, 1)
    assert [entry["visible_rows"] for entry in told["images"]] == [1, 2, 3]


def test_completions_do_not_depend_on_batch_size_or_number(grey: Path, tmp_path: Path) -> None:
    sample(grey, tmp_path / "a", "task=complete", "n=3", "completions=3", "seed=5")
    sample(grey, tmp_path / "b", "task=complete", "n=2", "completions=2", "seed=5", "batch_size=1")
    a, b = read_images(tmp_path / "a"), read_images(tmp_path / "b")
    assert set(b) < set(a)
    for name, image in b.items():
        np.testing.assert_array_equal(image, a[name])


def test_completes_a_folder(colour: Path, tmp_path: Path) -> None:
    files = ["a.png", "b/c.png", "b/d.png"]
    images = [write_image(tmp_path / "in" / name, (4, 6, 3), i) for i, name in enumerate(files)]
    (tmp_path / "in" / "notes.txt").write_text("no image")
    (tmp_path / "in" / ".hidden.png").write_text("no image")
    out = tmp_path / "out"
    sample(
        colour, out, "task=complete", f"images={tmp_path / 'in'}", "visible_rows=2", "completions=2"
    )
    told = manifest(out)
    assert [entry["source"] for entry in told["images"]] == [
        str(tmp_path / "in" / name) for name in files
    ]
    for entry, image in zip(told["images"], images, strict=True):
        np.testing.assert_array_equal(read(out / entry["original"]), image)
        for name in entry["completions"]:
            np.testing.assert_array_equal(read(out / name)[:2], image[:2])


def test_completes_files_in_the_order_given(colour: Path, tmp_path: Path) -> None:
    for i, name in enumerate(["a.png", "b.png"]):
        write_image(tmp_path / name, (4, 6, 3), i)
    names = [str(tmp_path / name) for name in ("b.png", "a.png")]
    out = tmp_path / "out"
    sample(
        colour, out, "task=complete", f"images=[{','.join(names)}]", "visible=[0.25,0.5]",
        "completions=1",
    )  # fmt: skip
    entries = manifest(out)["images"]
    assert [entry["source"] for entry in entries] == names
    assert [entry["visible_rows"] for entry in entries] == [1, 2]
    sample(colour, out, "task=complete", f"images=[{','.join(names)}]", "n=1", "completions=1")
    assert [entry["source"] for entry in manifest(out)["images"]] == names[:1]


def test_what_it_drew_can_be_completed(grey: Path, tmp_path: Path) -> None:
    sample(grey, tmp_path / "first", "n=2")
    drawn = read_images(tmp_path / "first")
    sample(grey, tmp_path / "second", "task=complete", f"images={tmp_path / 'first' / 'images'}")
    second = read_images(tmp_path / "second")
    for i in range(2):
        np.testing.assert_array_equal(second[f"{i:05d}-original.png"], drawn[f"{i:05d}.png"])


def test_images_are_converted_where_the_meaning_is_clear(colour: Path, tmp_path: Path) -> None:
    grey_image = write_image(tmp_path / "in" / "grey.png", (4, 6))
    deep = grey_image.astype(np.uint16) * 257
    Image.fromarray(deep).save(tmp_path / "in" / "sixteen.png")
    Image.fromarray(grey_image).convert("P").save(tmp_path / "in" / "palette.png")
    sample(colour, tmp_path / "out", "task=complete", f"images={tmp_path / 'in'}", "completions=1")
    expected = np.repeat(grey_image[..., None], 3, axis=2)
    for i in range(3):
        found = read(tmp_path / "out" / "images" / f"{i:05d}-original.png")
        np.testing.assert_array_equal(found, expected)


def test_other_sizes_are_resized_on_demand(colour: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "big.png", (12, 12, 3))
    sample(
        colour, tmp_path / "out", "task=complete", f"images={tmp_path / 'big.png'}", "resize=true"
    )
    assert read(tmp_path / "out/images/00000-original.png").shape == (4, 6, 3)


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
        (["task=draw"], "task=draw is unknown; it can be sample, complete"),
        (["device=tpu"], "device=tpu is unknown; it can be auto, cpu, cuda"),
        (["device=cuda:99"], "device=cuda:99, but PyTorch finds"),
        (["images=x.png"], "images has no meaning in task=sample; add task=complete"),
        (["completions=2"], "completions has no meaning in task=sample"),
        (["task=complete", "completions=0"], "completions=0, but it must be a whole number"),
        (["task=complete", "visible=1"], "visible=1, but it must be a share of the rows"),
        (["task=complete", "visible=1.5"], "visible=1.5, but"),
        (["task=complete", "visible=-0.1"], "visible=-0.1, but"),
        (["task=complete", "visible=nan"], "visible=nan, but"),
        (["task=complete", "visible=[0.5,half]"], "visible=half, but"),
        (["task=complete", "visible_rows=8"], "visible_rows=8, but it must be .* from 0 to 7"),
        (["task=complete", "visible_rows=-1"], "visible_rows=-1, but"),
        (["task=complete", "visible=0.5", "visible_rows=2"], "visible and visible_rows are both"),
        (["task=complete", "n=3", "visible=[0.5,0.2]"], "visible is a list of 2, but there are 3"),
        (["task=complete", "n=361"], "n=361, but the test split of digits holds 360 images"),
        (["task=complete", "visible=[]"], "visible is an empty list"),
        (["task=complete", "images=[]"], "images is empty"),
        (["task=complete", "images=nowhere"], "images=.*nowhere does not exist"),
        (["task=complete", "resize=maybe"], "resize=maybe, but it must be true or false"),
        (["task=complete", "dataset.root=x"], "Digits cannot be built"),
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


def test_images_that_cannot_be_completed_are_named(grey: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "in" / "a.png", (8, 8))
    refused = tmp_path / "in" / "b.png"

    def complete(*overrides: str) -> None:
        sample(grey, tmp_path / "out", "task=complete", f"images={tmp_path / 'in'}", *overrides)

    write_image(refused, (9, 8))
    with pytest.raises(
        UserError, match=r"b\.png is 9x8 pixels \(height x width\), but the model draws 8x8; .*"
    ):
        complete()
    whole = refused.read_bytes()
    refused.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"b\.png cannot be read"):
        complete()
    refused.unlink()
    with pytest.raises(UserError, match="n=2, but images holds 1 in all"):
        complete("n=2")
    (tmp_path / "in" / "a.png").unlink()
    with pytest.raises(UserError, match=r"images=.*in holds no images \("):
        complete()
    assert tree(tmp_path) == {"in"}


def test_the_images_to_complete_are_not_replaced(grey: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sample(grey, out, "n=2")
    before = read_images(out)
    with pytest.raises(UserError, match=r"00000\.png lies in out=.*choose another out"):
        sample(grey, out, "task=complete", f"images={out / 'images'}")
    assert read_images(out).keys() == before.keys()


def test_a_folder_that_cannot_be_written_is_refused_before_drawing(
    grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("drew before looking at out")

    monkeypatch.setattr(generation, "generate", refuse)
    monkeypatch.setattr(generation, "complete", refuse)
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        for task in ("task=sample", "task=complete"):
            with pytest.raises(UserError, match=str(out)):
                sample(grey, out, task)
    assert tree(tmp_path) == {"file"}
    assert (tmp_path / "file").read_text() == "mine"


def test_an_interruption_leaves_nothing(
    grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = generation.generate

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        batches = whole(*args, **kwargs)
        yield next(batches)
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sample(grey, tmp_path / "below" / "out", "n=4", "batch_size=2")
    assert not tree(tmp_path)


def test_a_checkpoint_replaced_while_it_is_read_is_refused(
    grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = tmp_path / "last.ckpt"
    ckpt.write_bytes(grey.read_bytes())
    from imagegen import checkpoint

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
    assert len(done.stdout.splitlines()) == 2
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
