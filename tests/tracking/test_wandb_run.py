"""wandb for real, offline: what its files hold after runs that end, are killed, and go on."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytorch_lightning import Callback

from imagegen.tracking.loggers import build_loggers, close_loggers, logger_state
from imagegen.tracking.wandb_file import last_wandb_step
from tests.forks import TRAIN, Forks
from tests.helpers import DRAWING, WANDB, read, read_rows, read_wandb, run_train, wandb_records

LOGGED = [*(text for text in DRAWING if text != "logger=none"), "trainer.log_every_n_steps=1"]
STEP = "trainer/global_step"


OWN_SERVICE = {"WANDB_SERVICE": None}


class Killed(Callback):
    """Kills the process after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def _no_run_is_left() -> Iterator[None]:
    yield
    import wandb

    assert wandb.run is None


def _folders(run: Path) -> list[Path]:
    return sorted((run / "wandb").glob("offline-run-*"))


def _history(*folders: Path) -> dict[int, dict[str, Any]]:
    """Rows by step; each step once, in order, and its number is wandb's own."""
    rows = [row for folder in folders for row in read_wandb(folder)[1]]
    steps = [row[STEP] for row in rows]
    assert steps == sorted(set(steps))
    assert steps == [row["_step"] for row in rows]
    return dict(zip(steps, rows, strict=True))


def _assert_as_in_csv(history: dict[int, dict[str, Any]], run: Path) -> None:
    rows = read_rows(run)
    assert list(history) == [int(row["step"]) for row in rows]
    for row in rows:
        for name in ("train/bits_per_dim", "val/bits_per_dim", "lr-AdamW"):
            found = history[int(row["step"])].get(name)
            assert found == (float(row[name]) if row[name] else None), (row["step"], name)


def test_a_run_holds_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    options = [f"hydra.run.dir={run}", "logger.log_model=true", "logger.group=trials"]
    options += [
        "logger.tags=[small,digits]",
        "logger.name=first",
        "logger.project=images",
        "seed=3",
    ]
    assert run_train(monkeypatch, *LOGGED, *options) == 0
    (folder,) = _folders(run)
    history = _history(folder)
    _assert_as_in_csv(history, run)
    assert list(history) == list(range(12))
    for step in (6, 12):
        for kind in ("samples", "completions"):
            (logged,) = history[step - 1][f"val/{kind}.filenames"]
            picture = read(run / "samples" / f"step-{step:07d}-{kind}.png")
            assert np.array_equal(read(folder / "files" / logged), picture)

    config, _ = read_wandb(folder)
    assert (config["seed"], config["model"]["d_model"]) == (3, 16)
    records = wandb_records(folder)
    (described,) = [r.run for r in records if r.HasField("run")]
    assert (described.project, described.display_name) == ("images", "first")
    assert (described.run_group, list(described.tags)) == ("trials", ["small", "digits"])
    (ended,) = [r.exit for r in records if r.HasField("exit")]
    assert ended.exit_code == 0

    artifacts = _artifacts(records)
    assert sorted(artifacts) == ["best", "last"]
    for alias, artifact in artifacts.items():
        assert (artifact.name, artifact.type) == (f"model-{described.run_id}", "model")
        (entry,) = artifact.manifest.contents
        content = (run / "checkpoints" / f"{alias}.ckpt").read_bytes()
        assert entry.path == f"{alias}.ckpt"
        assert entry.digest == base64.b64encode(hashlib.md5(content).digest()).decode()
    best = json.loads((run / "summary.json").read_text())["best_bits_per_dim"]
    assert json.loads(artifacts["best"].metadata) == {"val/bits_per_dim": best}


def _artifacts(records: list[Any]) -> dict[str, Any]:
    found = {}
    for record in records:
        if record.HasField("artifact"):
            found.update(dict.fromkeys(record.artifact.aliases, record.artifact))
        elif record.HasField("request") and record.request.HasField("log_artifact"):
            logged = record.request.log_artifact.artifact
            found.update(dict.fromkeys(logged.aliases, logged))
    found.pop("latest", None)
    return found


def test_a_killed_run_goes_on_without_gap_or_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Forks
) -> None:
    run = tmp_path / "run"
    killed = "+callbacks.killed={_target_:tests.tracking.test_wandb_run.Killed,step:%d}"
    typed = [*LOGGED, killed % 9, f"hydra.run.dir={run}"]
    done = forks.run(TRAIN, *typed, env=OWN_SERVICE)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (first,) = _folders(run)
    assert run_train(monkeypatch, f"resume={run}", killed % 99) == 0
    folders = _folders(run)
    assert len(folders) == 2
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1
    history = _history(first, next(folder for folder in folders if folder != first))
    _assert_as_in_csv(history, run)
    assert list(history) == list(range(12))


@pytest.mark.parametrize(("resumed", "lost"), [(6, 0), (6, 5), (8, 2)])
def test_rows_that_wandb_has_are_left_out_and_lost_ones_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: int, lost: int
) -> None:
    """A run of 9 steps whose last rows wandb had not written; resumed after `resumed` of them."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    first = build_loggers(WANDB, tmp_path, {"seed": 1})
    for step in range(9):
        for logger in first if step < 9 - lost else first[:1]:
            logger.log_metrics({"lr": 0.5}, step)
            logger.log_metrics({"loss": float(step)}, step)
    state = logger_state(first)
    close_loggers(first, success=False)
    wandb_records(*_folders(tmp_path))  # Waits until all is written
    assert last_wandb_step(tmp_path, state["wandb_id"]) == 8 - lost
    second = build_loggers(WANDB, tmp_path, {"seed": 1}, {"step": resumed, **state})
    for step in range(resumed, 12):
        for logger in second:
            logger.log_metrics({"lr": 0.5}, step)
            logger.log_metrics({"loss": float(step)}, step)
    # The 13th step fails after its learning rate has been logged.
    second[1].log_metrics({"lr": 0.5}, 12)
    close_loggers(second, success=False, steps=12)
    history = _history(*sorted(_folders(tmp_path), key=lambda folder: folder.stat().st_mtime))
    assert {step: (row["lr"], row["loss"]) for step, row in history.items()} == {
        step: (0.5, float(step)) for step in range(12)
    }


def test_nothing_is_known_of_other_files(tmp_path: Path) -> None:
    assert last_wandb_step(tmp_path, "abc") is None
    file = tmp_path / "wandb" / "offline-run-1-abc" / "run-abc.wandb"
    file.parent.mkdir(parents=True)
    for content in (b"", b":W&B\x00", b"x" * 70_000):
        file.write_bytes(content)
        assert last_wandb_step(tmp_path, "abc") == -1


def test_a_lost_service_does_not_stop_training(tmp_path: Path, forks: Forks) -> None:
    """wandb's own process dies in the middle of a run."""
    script = """
import os, pathlib, signal, sys, time
import numpy as np
from imagegen.tracking.loggers import build_loggers, close_loggers, log_images
run = pathlib.Path(sys.argv[1])
options = {"_target_": "imagegen.tracking.loggers.wandb_logger", "project": "p"}
loggers = build_loggers(options, run, {})
for step in range(100):
    for logger in loggers:
        logger.log_metrics({"loss": 1.0}, step)
    log_images(loggers, "val/samples", np.zeros((4, 4, 3), np.uint8), step + 1)
    if step == 3:
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            pid, name = stat.read_text().split()[:2]
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if "wandb" in name and parent == os.getpid():
                os.kill(int(pid), signal.SIGKILL)
                print("killed", name)
        time.sleep(1)
close_loggers(loggers)
print("came to its end")
"""
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc, to find wandb's process")
    done = forks.run(script, str(tmp_path), env=OWN_SERVICE)
    assert done.returncode == 0, done.stderr
    assert "killed" in done.stdout
    assert "came to its end" in done.stdout
    assert done.stderr.count("so the run continues without it; metrics.csv has everything") == 1
    assert len(read_rows(tmp_path)) == 100
