"""A sampling job that is stopped, continued, shared, or asked for something else half-way."""

from __future__ import annotations

import json
import os
import signal
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.core.errors import UserError
from imagegen.core.files import lock_folder, sha256_of
from imagegen.data.convert import read_image
from imagegen.generation import sampling_loop as generation
from imagegen.generation.images import from_display, to_display
from imagegen.generation.sampling_loop import complete, generate
from imagegen.heads.controls import Controls
from imagegen.model.transformer import ImageTransformer
from tests.forks import SAMPLE, Fork, Forks
from tests.helpers import (
    manifest,
    read_images,
    sample,
    save_colour_checkpoint,
    save_tiny_checkpoint,
    tree,
)

OF_A_PROCESS = ("seconds", "images_per_second", "created", "machine")
JOBS = {
    "sample": ["n=6", "batch_size=2", "seed=5", "temperature=0.9"],
    "complete": [
        "task=complete",
        "n=3",
        "completions=2",
        "batch_size=2",
        "visible=[0.5,0.75,0.5]",
    ],
}


@pytest.fixture(scope="module")
def whole(grey: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The result of each of the jobs when nothing happens to it."""
    made: dict[str, Path] = {}

    def make(job: str) -> Path:
        if job not in made:
            made[job] = tmp_path_factory.mktemp("whole") / job
            sample(grey, made[job], *JOBS[job])
        return made[job]

    return make


def assert_same_result(out: Path, expected: Path) -> None:
    """The same files with the same bytes; of the manifest, all but times and the machine."""
    assert tree(out) == tree(expected)
    for name in tree(out):
        if (out / name).is_file() and name != "manifest.json":
            assert (out / name).read_bytes() == (expected / name).read_bytes(), name
    told, wanted = manifest(out), manifest(expected)
    for name in OF_A_PROCESS:
        assert name in told
        told.pop(name), wanted.pop(name)
    assert told == wanted


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Raise after so many batches."""
    for name in ("draw_images", "draw_completions"):
        draw = getattr(generation, name)

        def broken(*args: Any, draw: Any = draw, **kwargs: Any) -> Any:
            batches = draw(*args, **kwargs)
            for _ in range(after):
                yield next(batches)
            raise error

        monkeypatch.setattr(generation, name, broken)


def start(forks: Forks, ckpt: Path, out: Path, *options: str) -> Fork:
    typed = (f"ckpt={ckpt}", f"out={out}", "device=cpu", *options)
    return forks.start(SAMPLE, *typed, cwd=out.parent)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_process_leaves_whole_files_and_is_continued(
    forks: Forks, grey: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out, options = tmp_path / "out", ["n=160"]
    process = start(forks, grey, out, *options, "batch_size=3")
    while process.poll() is None and len(list(out.glob("images/*.png"))) < 9:
        time.sleep(0.01)
    process.send_signal(number)
    done = process.wait(120)
    error = done.stderr
    assert done.returncode == (130 if number == signal.SIGTERM else -signal.SIGKILL)
    left = read_images(out) if number == signal.SIGTERM else {}
    drawn = len(list(out.glob("images/[0-9]*.png")))
    assert 9 <= drawn < 160
    assert manifest(out)["state"] == "unfinished"
    if number == signal.SIGTERM:
        assert f"keeps the {drawn} images that are there" in error
        assert "resume=true" in error
        assert "Traceback" not in error
        assert len(left) == drawn
        assert tree(out) == {"manifest.json", "images"} | {f"images/{name}" for name in left}
    with pytest.raises(UserError, match=r"holds a job that is not finished; add resume=true"):
        sample(grey, out, *options)
    before = {path: path.stat().st_mtime_ns for path in out.glob("images/[0-9]*.png")}
    sample(grey, out, *options, "resume=true")
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())
    sample(grey, tmp_path / "whole", *options)
    assert_same_result(out, tmp_path / "whole")


def test_two_processes_share_a_job(
    forks: Forks, grey: Path, tmp_path: Path, whole: Callable[[str], Path]
) -> None:
    out = tmp_path / "out"
    processes = [start(forks, grey, out, *JOBS["sample"], f"part={part}/2") for part in (1, 2)]
    told = [process.wait(120) for process in processes]
    assert [done.returncode for done in told] == [0, 0], told
    assert all("\n3 images in " in done.stdout for done in told)
    assert any("look at" in done.stdout for done in told)
    assert_same_result(out, whole("sample"))


@pytest.mark.parametrize("job", JOBS)
def test_parts_one_after_the_other(
    grey: Path,
    tmp_path: Path,
    whole: Callable[[str], Path],
    job: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for part in (3, 1, 2):
        sample(grey, tmp_path / "out", *JOBS[job], f"part={part}/3")
        assert (tmp_path / "out" / "grid.png").exists() == (part == 2)
    assert "the other parts must still draw" in capsys.readouterr().out
    assert_same_result(tmp_path / "out", whole(job))


@pytest.mark.parametrize(
    ("job", "error"),
    [("sample", KeyboardInterrupt()), ("complete", UserError("the disk is full."))],
)
def test_what_was_drawn_before_an_error_is_kept(
    grey: Path,
    tmp_path: Path,
    whole: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    error: BaseException,
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt(patch, 2, error)
        with pytest.raises(type(error)):
            sample(grey, out, *JOBS[job])
    assert len(list(out.glob("images/*[0-9].png"))) == 4
    assert manifest(out)["state"] == "unfinished"
    sample(grey, out, *JOBS[job], "resume=true")
    assert_same_result(out, whole(job))


def test_nothing_drawn_leaves_nothing(
    grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, 0, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        sample(grey, tmp_path / "below" / "out", "n=4", "batch_size=2")
    assert not tree(tmp_path)


def test_an_interruption_keeps_an_earlier_result(
    grey: Path, tmp_path: Path, whole: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample(grey, tmp_path / "out", *JOBS["sample"])
    with monkeypatch.context() as patch:
        interrupt(patch, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            sample(grey, tmp_path / "out", "n=4", "batch_size=2", "seed=6")
    assert_same_result(tmp_path / "out", whole("sample"))


@pytest.mark.parametrize("job", JOBS)
def test_only_what_is_missing_or_broken_is_drawn(
    grey: Path,
    tmp_path: Path,
    whole: Callable[[str], Path],
    job: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    sample(grey, out, *JOBS[job])
    capsys.readouterr()
    sample(grey, out, *JOBS[job], "resume=true")
    assert capsys.readouterr().out == f"nothing is missing in {out}\n"
    lost, broken = list(out.glob("images/*[0-9].png"))[1:6:4]
    lost.unlink()
    broken.write_bytes(broken.read_bytes()[:-20])
    (out / "images" / ".00000.png.left.partial").write_bytes(b"by a killed process")
    sample(grey, out, *JOBS[job], "resume=true")
    assert "\n2 " in capsys.readouterr().out
    assert_same_result(out, whole(job))
    (out / "grid.png").unlink()
    sample(grey, out, *JOBS[job], "resume=true")
    assert_same_result(out, whole(job))


@pytest.mark.parametrize("job", JOBS)
def test_a_finished_job_takes_more_images(
    grey: Path, tmp_path: Path, whole: Callable[[str], Path], job: str
) -> None:
    out = tmp_path / "out"
    fewer = {"sample": ["n=3"], "complete": ["n=2", "visible=[0.5,0.75]"]}[job]
    sample(grey, out, *JOBS[job], *fewer)
    sample(grey, out, *JOBS[job], "resume=true")
    assert_same_result(out, whole(job))
    with pytest.raises(UserError, match=r"holds a job with n=\d+, not \d; give the same n"):
        sample(grey, out, *JOBS[job], *fewer, "resume=true")


@pytest.mark.parametrize(
    ("job", "option", "named"),
    [
        ("sample", "seed=6", "seed=5, not 6"),
        ("sample", "temperature=1", r"temperature=0\.9, not 1\.0"),
        ("sample", "top_p=0.5", r"top_p=1\.0, not 0\.5"),
        ("sample", "task=complete", '"sample", not "complete"'),
        ("complete", "completions=4", "completions=2, not 4"),
        ("complete", "visible=0.5", "image 1 is digits/test/1 with 6 rows, not .* with 4 rows"),
    ],
)
@pytest.mark.parametrize("how", ["resume=true", "part=1/2"])
def test_another_job_is_not_continued(
    grey: Path,
    tmp_path: Path,
    whole: Callable[[str], Path],
    job: str,
    option: str,
    named: str,
    how: str,
) -> None:
    with pytest.raises(UserError, match=rf"out=.* holds a job .*{named}"):
        sample(grey, whole(job), *JOBS[job], option, how)


def test_another_model_does_not_continue(tmp_path: Path, whole: Callable[[str], Path]) -> None:
    other = save_tiny_checkpoint(tmp_path / "other.ckpt", seed=1)
    with pytest.raises(UserError, match=r"from another checkpoint, or from .* before"):
        sample(other, whole("sample"), *JOBS["sample"], "resume=true")


def test_one_job_at_a_time(grey: Path, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    (tmp_path / "out").mkdir()
    lock = lock_folder(tmp_path / "out", shared=True)
    assert lock is not None
    with pytest.raises(UserError, match=r"another python sample\.py is writing to .*out"):
        sample(grey, tmp_path / "out", "n=1")
    sample(grey, tmp_path / "out", "n=2", "part=1/2")
    os.close(lock)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("part=0/2", "part=0/2, but it must be <which>/<how many>: 1/2 and 2/2"),
        ("part=3/2", "part=3/2, but"),
        ("part=2", "part=2, but"),
        ("resume=maybe", "resume=maybe, but it must be true or false"),
    ],
)
def test_refusals(grey: Path, tmp_path: Path, option: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        sample(grey, tmp_path / "out", option)
    assert not tree(tmp_path)


def test_a_whole_job_needs_its_folder(grey: Path, tmp_path: Path) -> None:
    for option in ("part=1/2", "resume=true"):
        with pytest.raises(UserError, match="needs out=<the folder of the whole job>"):
            sample(grey, tmp_path, option, "out=null")


def test_the_manifest_is_enough_to_make_an_image_again(whole: Callable[[str], Path]) -> None:
    for job in JOBS:
        told = json.loads((whole(job) / "manifest.json").read_text())
        checkpoint = Path(told["checkpoint"])
        assert sha256_of(checkpoint) == told["checkpoint_sha256"]
        model = load_checkpoint(checkpoint).model
        names = ("temperature", "mixture_temperature", "scale_temperature", "top_p", "guidance")
        how: dict[str, Any] = {
            "seed": told["seed"],
            "controls": Controls(**{name: told[name] for name in names}),
            "labels": told["labels"],
        }
        channels, levels = told["image_shape"][2], told["levels"]
        if job == "sample":
            again = next(generate(model, 1, start=4, **how))
            found = read_image(whole(job) / "images" / "00004.png", channels)
            assert np.array_equal(to_display(again[0], levels), found)
            continue
        originals = [
            from_display(read_image(whole(job) / entry["original"], channels), levels)
            for entry in told["images"]
        ]
        rows = [entry["visible_rows"] for entry in told["images"]]
        drawn = to_display(complete(model, np.stack(originals), rows, 2, **how), levels)
        for entry, completions in zip(told["images"], drawn, strict=True):
            for name, completion in zip(entry["completions"], completions, strict=True):
                assert np.array_equal(read_image(whole(job) / name, channels), completion)


def test_memory_does_not_grow_with_the_number_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn images, here black ones of 12 KiB that cost nothing, are written and forgotten."""
    ckpt = save_colour_checkpoint(tmp_path, 64, 64)

    def images(model: ImageTransformer, chosen: Any, **options: Any) -> Any:
        for first in range(0, len(chosen), 64):
            keys = chosen[first : first + 64]
            yield np.zeros((len(keys), *model.spec.shape), dtype=np.uint8)

    def completions(model: Any, originals: Any, rows: Any, chosen: Any, **options: Any) -> Any:
        for first, drawn in zip(range(0, len(chosen), 64), images(model, chosen), strict=True):
            yield chosen[first : first + 64], drawn

    monkeypatch.setattr("imagegen.generation.images.GRID_TILES", 8)
    monkeypatch.setattr(generation, "draw_images", images)
    monkeypatch.setattr(generation, "draw_completions", completions)

    def peak(name: str, *options: str) -> int:
        tracemalloc.start()
        sample(ckpt, tmp_path / name, "temperature=0", *options)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    completing = ["task=complete", f"images={tmp_path / 'photos'}", "n=4"]
    for name, few, many in (
        ("samples", ["n=128"], ["n=428"]),
        ("completions", [*completing, "completions=32"], [*completing, "completions=107"]),
    ):
        before = peak(f"{name} few", *few)
        grown = peak(f"{name} many", *many) - before
        # Were they kept, they would take 300 times 12 KiB.
        assert grown < 1 << 20, grown
