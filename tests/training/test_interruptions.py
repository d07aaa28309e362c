"""Runs that are killed, at any moment, and continued; and runs that SLURM moves."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.training.stopping import Interrupted, Interruptible, requeue_job
from tests.forks import TRAIN, Forks
from tests.helpers import DRAWING, SMALL

OPTIONS = [
    *DRAWING,
    "logger=csv",
    "trainer.log_every_n_steps=1",
    "model.dropout=0.2",
    "model.flips=true",
    "callbacks.ema.decay=0.9",
    "callbacks.grids.every=2",
]

# train.py that ends somewhere. Its first two arguments say where, and at which step or how often it
# passes there before; the others are what is typed.
CHILD = """
import os, signal, sys
import imagegen.core.errors, train
from imagegen.training import callbacks, checkpoint_callbacks, module, run as training

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def arm(where, passes):
    step, write = module.ImageModule.training_step, training.write_atomic
    seen = 0
    stepped = callbacks.Rates.on_train_batch_end

    def training_step(self, *args):
        if self.trainer.global_step == passes:
            if where == "step":
                die()
            if where == "ctrl-c":
                os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args)

    def on_train_batch_end(self, trainer, *args):
        if where == "error" and trainer.global_step == passes:
            raise imagegen.core.errors.UserError("the disk is full.")
        stepped(self, trainer, *args)

    def write_atomic(path, data, **options):
        nonlocal seen
        if path.name == where:
            seen += 1
            if seen > passes:
                os.replace = die
                data = data[: len(data) // 2]
        write(path, data, **options)

    module.ImageModule.training_step = training_step
    training.write_atomic = checkpoint_callbacks.write_atomic = write_atomic
    callbacks.Rates.on_train_batch_end = on_train_batch_end

arm(sys.argv[1], int(sys.argv[2]))
sys.argv = ["train.py", *sys.argv[3:]]
train.main()
"""


def _train(forks: Forks, *processes: tuple[str, int, list[str]]) -> list[int]:
    """The exit status of each of the processes; -9 for one that was killed."""
    states = []
    for where, passes, typed in processes:
        done = forks.run(CHILD, where, str(passes), *typed)
        assert "Traceback" not in done.stderr
        states.append(done.returncode)
    return states


def read_rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row.pop("train/images_per_second")
    return rows


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def _assert_same_run(parts: Path, whole: Path) -> None:
    """All that is logged, kept and drawn is bit for bit the same."""
    assert read_rows(parts) == read_rows(whole)
    for name in ("last.ckpt", "best.ckpt"):
        found, expected = (
            torch.load(run / "checkpoints" / name, weights_only=True) for run in (parts, whole)
        )
        for key in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers"):
            assert _equal(found[key], expected[key]), (name, key)
        assert found["global_step"] == expected["global_step"]
        load_checkpoint(parts / "checkpoints" / name)
    pictures = sorted(path.name for path in (whole / "samples").iterdir())
    assert sorted(path.name for path in (parts / "samples").iterdir()) == pictures
    for name in pictures:
        assert (parts / "samples" / name).read_bytes() == (whole / "samples" / name).read_bytes()
    assert not list(parts.rglob(".*.partial"))
    assert json.loads((parts / "summary.json").read_text())["state"] == "finished"


@pytest.mark.parametrize("validate_every", [6, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_continued(
    tmp_path: Path, forks: Forks, validate_every: int
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    every = f"trainer.val_check_interval={validate_every if validate_every < 6 else 1.0}"
    options = [*OPTIONS, "trainer.max_epochs=3", every]
    begun, goes_on = [*options, f"hydra.run.dir={parts}"], [f"resume={parts}"]
    moments = [
        ("step", 2, begun),  # before the first validation
        ("step", 5, goes_on),
        ("best.ckpt", 0, goes_on),  # in the middle of the first one
        ("last.ckpt", 0, goes_on),  # between it and the next
        ("step", 10, goes_on),
        ("step", 17, goes_on),
        ("last.ckpt", 0, goes_on),
    ]
    states = _train(forks, ("never", 0, [*options, f"hydra.run.dir={whole}"]), *moments)
    assert states == [0] + [-signal.SIGKILL] * len(moments)
    # Whole, though a process was killed while it wrote the next.
    assert 0 < torch.load(parts / "checkpoints/last.ckpt", weights_only=True)["global_step"] < 18
    assert list((parts / "checkpoints").glob(".last.ckpt.*.partial"))
    assert _train(forks, ("never", 0, goes_on)) == [0]
    _assert_same_run(parts, whole)
    assert [int(row["step"]) for row in read_rows(parts)] == list(range(18))


def test_nothing_is_lost_or_taken_twice_of_a_step_of_several_batches(
    tmp_path: Path, forks: Forks
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*OPTIONS, "trainer.max_epochs=3", "trainer.accumulate_grad_batches=2"]
    begun, goes_on = [*options, f"hydra.run.dir={parts}"], [f"resume={parts}"]
    states = _train(
        forks,
        ("never", 0, [*options, f"hydra.run.dir={whole}"]),
        ("ctrl-c", 4, begun),  # at the first of two batches
        ("error", 7, goes_on),  # when the weights have moved
        ("never", 0, goes_on),
    )
    assert states == [0, 130, 1, 0]
    _assert_same_run(parts, whole)


def test_slurm_takes_the_machine_away(tmp_path: Path, forks: Forks) -> None:
    """Its warning saves and asks for another turn, here in vain; the same command then goes on."""
    run = tmp_path / "run"
    typed = [
        *SMALL,
        "trainer.max_epochs=-1",
        "trainer.max_steps=100000",
        f"hydra.run.dir={run}",
        "resume=auto",
    ]
    job = {"SLURM_JOB_ID": "123", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1"}
    place = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    env = {**job, **place, "PATH": str(tmp_path / "nothing")}
    process = forks.start(TRAIN, *typed, cwd=tmp_path, env=env)
    while "\nstep " not in process.stdout.read_text():  # the first validation
        assert process.poll() is None, process.stderr.read_text()
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    stopped = process.wait(300)
    error = stopped.stderr
    assert stopped.returncode == 130, error
    assert "Traceback" not in error
    assert "stopping after this step\n" in error
    assert "SLURM could not be asked to run job 123 again: scontrol: No such file" in error
    steps = json.loads((run / "summary.json").read_text())["steps"]
    saved = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == steps >= 6
    # Lightning's own way would leave a checkpoint where the command was typed.
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    done = forks.run(TRAIN, *typed, f"trainer.max_steps={steps + 2}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "summary.json").read_text())["steps"] == steps + 2


@pytest.mark.parametrize("warning", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("before", [True, False])
def test_a_warning_counts_whatever_comes_with_it(
    monkeypatch: pytest.MonkeyPatch, warning: signal.Signals, before: bool
) -> None:
    """SLURM sends SIGTERM too: before it to a job that makes way, after it when time is over."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    theirs: list[int] = []
    known = signal.signal(warning, lambda number, frame: theirs.append(number))
    callback, trainer, module = Interruptible(), Trainer(logger=False), LightningModule()
    try:
        callback.on_train_start(trainer, module)
        for number in [signal.SIGTERM, warning] if before else [warning, signal.SIGTERM]:
            os.kill(os.getpid(), number)
        assert callback.preempted
        with pytest.raises(Interrupted):
            callback.on_train_batch_start(trainer, module, None, 0)
        callback.teardown(trainer, module, "fit")
        assert not theirs
        os.kill(os.getpid(), warning)
        assert theirs == [warning]
    finally:
        callback.teardown(trainer, module, "fit")
        signal.signal(warning, known)


@pytest.mark.parametrize(
    ("job", "status", "asked", "said"),
    [
        ({"JOB_ID": "12"}, 0, "requeue 12", "SLURM runs job 12 again"),
        (
            {"JOB_ID": "12", "ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "3"},
            0,
            "requeue 7_3",
            "SLURM runs job 7_3 again",
        ),
        ({"JOB_ID": "12"}, 1, "requeue 12", "could not be asked to run job 12 again: scontrol: no"),
    ],
)
def test_what_slurm_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job: dict[str, str],
    status: int,
    asked: str,
    said: str,
) -> None:
    script = tmp_path / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho no >&2\nexit {status}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert requeue_job() == (status == 0)
    assert (tmp_path / "asked").read_text() == f"{asked}\n"
    assert said in capsys.readouterr().err
