"""Training in two processes (gloo, on the CPU): the same run as in one, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.cli.entry import PROJECT_ROOT
from imagegen.core.errors import UserError
from imagegen.evaluation.scores import score_images
from imagegen.training.processes import check_sharding, require_one_folder
from tests.forks import TRAIN, Forks
from tests.helpers import DRAWING, read, read_rows, read_weights, run_train, write_image

TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
SHARED = [
    *(text for text in DRAWING if text not in ("trainer=cpu", "trainer.limit_val_batches=1")),
    "trainer.log_every_n_steps=1",
]
LAUNCHERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def _odd_images(folder: Path) -> list[str]:
    """Numbers of images that no two processes can share, and the options for them."""
    for split, count in (("train", 101), ("val", 13), ("test", 7)):
        for i in range(count):
            write_image(folder / split / f"{i:03}.png", (8, 8), seed=i)
    options = ["dataset=image_folder", f"dataset.root={folder}", "dataset.size=8"]
    return [*options, "dataset.channels=1", f"dataset.cache={folder.parent / 'cache'}"]


class Spy(Callback):
    """Writes down what each process does, and makes one of them do what it should not.

    Args:
        folder: for a file of each process.
        interrupt: step after which the first process, alone, is sent Ctrl-C; 0 for none.
        poison: step from which on the loss of the second process is not a number; 0 for none.
        fail: the process that fails after two steps; -1 for none.
        kill: the process that is killed after seven steps; -1 for none.
    """

    def __init__(
        self, folder: str, interrupt: int = 0, poison: int = 0, fail: int = -1, kill: int = -1
    ) -> None:
        self.folder = Path(folder)
        self.interrupt, self.poison, self.fail, self.kill = interrupt, poison, fail, kill

    def _note(self, trainer: Any, **what: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        note = {"pid": os.getpid(), "step": trainer.global_step, **what}
        with open(self.folder / f"{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(note) + "\n")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        step = pl_module.training_step

        def poisoned(batch: Any, batch_idx: int) -> torch.Tensor:
            bad = self.poison and trainer.global_step + 1 >= self.poison
            loss: torch.Tensor = step(batch, batch_idx)
            return loss * float("nan") if bad and trainer.global_rank == 1 else loss

        pl_module.training_step = poisoned

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, i: int) -> None:
        self._note(trainer, train=batch["indices"].tolist())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        total = sum(parameter.double().sum().item() for parameter in pl_module.parameters())
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self._note(trainer, weights=total, rate=rate)
        if trainer.global_step == self.interrupt and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGINT)
        if trainer.global_step == 2 and trainer.global_rank == self.fail:
            raise KeyError("a bug in one process")
        if trainer.global_step == 7 and trainer.global_rank == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, i: int) -> None:
        self._note(trainer, val=batch["indices"].tolist())


def _spy(folder: Path, **options: int) -> str:
    told = "".join(f",{name}:{value}" for name, value in options.items())
    return f"+callbacks.spy={{_target_:tests.training.test_processes.Spy,folder:{folder}{told}}}"


def _notes(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]


def _seen(notes: list[dict[str, Any]], what: str) -> dict[int, list[int]]:
    """The images that were seen at each step."""
    seen: dict[int, list[int]] = {}
    for note in notes:
        seen.setdefault(note["step"], []).extend(note.get(what, []))
    return {step: sorted(indices) for step, indices in seen.items() if indices}


def _assert_none_is_left(folder: Path) -> None:
    pids = {note["pid"] for rank in (0, 1) for note in _notes(folder, rank)} - {os.getpid()}
    assert pids
    until = time.monotonic() + 20
    for pid in pids:
        # One whose parent was killed may still be ending.
        while _is_there(pid):
            assert time.monotonic() < until, pid
            time.sleep(0.05)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _assert_same_metrics(rows: list[dict[str, str]], expected: list[dict[str, str]]) -> None:
    assert [row["step"] for row in rows] == [str(step) for step in range(12)]
    for row, other in zip(rows, expected, strict=True):
        for name in ("train/bits_per_dim", "val/bits_per_dim", "train/gradient_norm"):
            assert bool(row[name]) == bool(other[name])
            if row[name]:
                assert float(row[name]) == pytest.approx(float(other[name]), rel=1e-5)


def test_two_processes_do_what_one_does_also_when_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    odd = _odd_images(tmp_path / "images")
    # Half a batch twice is a batch, up to the rounding of float32.
    shared = [*SHARED, "trainer.precision=32-true", "scheduler=constant"]
    shared += ["callbacks.ema.decay=0.9", *odd]
    assert (
        run_train(
            monkeypatch,
            *shared,
            "trainer=cpu",
            "batch_size=16",
            _spy(tmp_path / "spy1"),
            f"hydra.run.dir={one}",
        )
        == 0
    )
    spied = tmp_path / "spy2"
    several = [*shared, *TWO, "batch_size=8", "logger=wandb", f"hydra.run.dir={two}"]
    assert run_train(monkeypatch, *several, _spy(spied, interrupt=9)) == 130
    _assert_none_is_left(spied)
    said = capfd.readouterr()
    assert "2 processes, 16 images per step" in said.out
    assert said.err.count("stopping after this step") == said.err.count("interrupted") == 1
    assert f"to continue: python train.py resume={two}" in said.err
    assert json.loads((two / "summary.json").read_text())["state"] == "interrupted"
    assert run_train(monkeypatch, f"resume={two}", _spy(spied)) == 0
    _assert_none_is_left(spied)

    _assert_same_metrics(read_rows(two), read_rows(one))

    # The same images at every step, none twice.
    alone, shares = _notes(tmp_path / "spy1", 0), [_notes(spied, rank) for rank in (0, 1)]
    for what in ("train", "val"):
        seen = [_seen(notes, what) for notes in shares]
        assert _seen(alone, what) == _seen([*shares[0], *shares[1]], what)
        assert all(seen[0][step] != seen[1][step] for step in seen[0])
    assert all(len(indices) == 16 for indices in _seen(alone, "train").values())
    assert list(_seen(alone, "val").values()) == [list(range(13))] * 2
    assert [n.get("weights") for n in shares[0]] == [n.get("weights") for n in shares[1]]

    summary = json.loads((two / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("finished", 12)
    ours, theirs = read_weights(two), read_weights(one)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)
    images = np.stack([read(path) for path in sorted((tmp_path / "images" / "test").iterdir())])
    scores = [score_images(load_checkpoint(run).model, images) for run in (one, two)]
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)

    assert sorted(path.name for path in (two / "checkpoints").iterdir()) == [
        "best.ckpt",
        "last.ckpt",
    ]
    assert len(list((two / "samples").iterdir())) == 4
    names = {path.name.rpartition("-")[2] for path in (two / "wandb").glob("offline-run-*")}
    assert len(names) == 1
    kept = (two / ".hydra" / "overrides.yaml").read_text()
    assert "batch_size=8" in kept


def test_bad_numbers_of_one_process_are_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, spied = tmp_path / "run", tmp_path / "spy"
    options = [*SHARED, *TWO, "on_nan=skip", "batch_size=8", "trainer.limit_train_batches=20"]
    options += ["trainer.max_time=00:00:05:00", _spy(spied, poison=4), f"hydra.run.dir={run}"]
    assert run_train(monkeypatch, *options) == 1
    _assert_none_is_left(spied)
    said = capfd.readouterr()
    assert said.err.count("error:") == 1
    assert "Traceback" not in said.err
    assert "for the 10th time in a row" in said.err
    assert said.out.count(": left out") == 9
    images = _notes(spied, 0)[-1]["train"] + _notes(spied, 1)[-1]["train"]
    assert f"with the training images {images}" in said.err
    notes = [[n for n in _notes(spied, rank) if "rate" in n] for rank in (0, 1)]
    # The schedule follows the time, which each process measures for itself.
    assert len({note["rate"] for note in notes[0]}) > 3
    assert [n["rate"] for n in notes[0]] == [n["rate"] for n in notes[1]]
    assert [n["weights"] for n in notes[0]] == [n["weights"] for n in notes[1]]
    assert np.isfinite(notes[0][-1]["weights"])
    assert all(value.isfinite().all() for value in read_weights(run).values())
    assert json.loads((run / "summary.json").read_text())["state"] == "failed"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_fails_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], rank: int
) -> None:
    run, spied = tmp_path / "run", tmp_path / "spy"
    assert (
        run_train(monkeypatch, *SHARED, *TWO, _spy(spied, fail=rank), f"hydra.run.dir={run}") == 1
    )
    _assert_none_is_left(spied)
    error = capfd.readouterr().err
    assert "KeyError: 'a bug in one process'" in error
    assert ("error: process 1 of this run has failed with status 1" in error) == (rank == 1)
    assert json.loads((run / "summary.json").read_text())["state"] == "failed"


@pytest.mark.parametrize(
    ("rank", "status", "sentence"),
    [
        pytest.param(
            0,
            -signal.SIGKILL,
            "error: the first process of this run has been killed, so the others have ended.",
            marks=pytest.mark.slow,
        ),
        (1, 1, "error: process 1 of this run has been killed by signal 9, so the run has ended;"),
    ],
)
def test_a_killed_process_ends_the_others_and_the_run_can_go_on(
    tmp_path: Path, forks: Forks, rank: int, status: int, sentence: str
) -> None:
    run, spied = tmp_path / "run", tmp_path / "spy"
    command = [*SHARED, *TWO, f"hydra.run.dir={run}", "resume=auto"]
    process = forks.start(TRAIN, *command, _spy(spied, kill=rank))
    process.wait()
    _assert_none_is_left(spied)
    killed = process.wait()  # with what the others have said since
    assert killed.returncode == status, killed.stderr
    assert killed.stderr.count("error:") == 1
    assert sentence in killed.stderr
    assert "Traceback" not in killed.stderr
    # That of the end of the first epoch.
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 6
    load_checkpoint(run)
    if rank:
        assert f"to continue: python train.py resume={run}" in killed.stderr
        assert json.loads((run / "summary.json").read_text())["state"] == "failed"
    else:
        resumed = forks.run(TRAIN, *command)
        assert resumed.returncode == 0, resumed.stderr
        assert [row["step"] for row in read_rows(run)] == [str(step) for step in range(12)]


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    """As docs/scaling.md says, with both processes started from outside, and interrupted."""
    run, spied = tmp_path / "run", tmp_path / "spy"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["train.py", *SHARED, *TWO]

    def start(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *options], cwd=PROJECT_ROOT, capture_output=True, text=True
        )

    refused = start()
    assert refused.returncode == 1
    assert "error: several processes were started" in refused.stderr
    stopped = start(f"hydra.run.dir={run}", _spy(spied, interrupt=9))
    assert stopped.returncode == 1
    assert f"to continue: python train.py resume={run}" in stopped.stderr
    resumed = start(f"resume={run}", _spy(spied))
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in read_rows(run)] == [str(step) for step in range(12)]
    assert resumed.stdout.count("best validation") == 1
    seen = _seen([*_notes(spied, 0), *_notes(spied, 1)], "train")
    assert all(len(set(indices)) == 64 for indices in seen.values())
    assert sorted(seen) == list(range(12))
    _assert_none_is_left(spied)


@pytest.mark.slow
def test_a_sweep_of_runs_of_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "day" / "time"
    options = ["--multirun", "seed=0,1", f"hydra.sweep.dir={folder}"]
    options.append(_spy(tmp_path / "spy"))
    options += [*SHARED, *TWO, "trainer.max_epochs=1"]
    assert run_train(monkeypatch, *options) == 0, capfd.readouterr().err
    _assert_none_is_left(tmp_path / "spy")
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["0", "1"]
    for number in (0, 1):
        summary = json.loads((folder / str(number) / "summary.json").read_text())
        assert (summary["state"], summary["steps"]) == ("finished", 6)
    assert read_weights(folder / "0").keys() == read_weights(folder / "1").keys()


@pytest.mark.parametrize(
    ("environment", "argv", "sentence"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["seed=1"], "name it with hydra.run.dir="),
        ({"SLURM_STEP_NUM_TASKS": "4"}, [], "name it with hydra.run.dir="),
        ({"NODE_RANK": "1"}, ["seed=1"], "name it with hydra.run.dir="),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["-m", "seed=1,2"], "leave out torchrun or srun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["hydra.run.dir=outputs/x"], None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ["seed=1"], None),
        ({"SLURM_STEP_NUM_TASKS": "1"}, ["--multirun", "seed=1,2"], None),
        ({}, ["seed=1"], None),
    ],
)
def test_processes_started_apart_share_a_folder(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    argv: list[str],
    sentence: str | None,
) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if sentence is None:
        assert require_one_folder(argv) == argv
        return
    with pytest.raises(UserError, match=sentence):
        require_one_folder(argv)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_cpu_offload", "ddp"])
def test_a_sharded_model_is_not_asked_for_all_its_weights(strategy: str) -> None:
    trainer = {"strategy": strategy, "gradient_clip_val": 1.0}
    callbacks = {"grids": {"n_samples": 16, "n_completed": 0}, "ema": {"decay": 0.9}}
    if strategy == "ddp":
        check_sharding(trainer, callbacks)
        return
    options = "trainer.gradient_clip_val=null callbacks.grids=null callbacks.ema.decay=null"
    with pytest.raises(UserError, match=f"{strategy} shards the model; add {options}"):
        check_sharding(trainer, callbacks)
    check_sharding({"strategy": strategy, "gradient_clip_val": None}, {"grids": None, "ema": {}})
