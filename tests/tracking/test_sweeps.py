"""Sweeps: each run has a folder of its own, all have a group, and a table ends them."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from imagegen.cli.entry import PROJECT_ROOT
from tests import slurm
from tests.forks import Forks
from tests.helpers import SMALL, run_train


def _is_installed(plugin: str) -> bool:
    try:
        return find_spec(f"hydra_plugins.{plugin}") is not None
    except ModuleNotFoundError:  # Hydra has no plugins at all.
        return False


def _sweep(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    small = [text for text in SMALL if not text.startswith(("logger", "callbacks"))]
    arguments = ["--multirun", *small, "trainer.max_epochs=1", "callbacks.grids=null"]
    arguments += [f"hydra.sweep.dir={folder}", *options]
    return subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "120"},
    )


@pytest.mark.skipif(not _is_installed("hydra_joblib_launcher"), reason="needs the extra joblib")
def test_two_by_two_side_by_side(tmp_path: Path) -> None:
    folder = tmp_path / "day" / "time"
    done = _sweep(folder, "sweep=joblib", "attention=linear,softmax", "seed=0,1", "logger=csv")
    assert done.returncode == 0, done.stderr
    best = {}
    for number, (attention, seed) in enumerate(
        (attention, seed) for attention in ("linear", "softmax") for seed in (0, 1)
    ):
        run = folder / str(number)
        summary = json.loads((run / "summary.json").read_text())
        assert summary["state"] == "finished"
        assert (run / "checkpoints" / "last.ckpt").exists()
        overrides = (run / ".hydra" / "overrides.yaml").read_text()
        assert f"attention={attention}" in overrides
        assert f"seed={seed}" in overrides
        best[number] = summary["best_bits_per_dim"]
    rows = re.findall(r"^│ (\d) +│.*│ +(\d+\.\d{4}) │.*finished │$", done.stdout, re.MULTILINE)
    assert [int(number) for number, _ in rows] == sorted(best, key=lambda n: best[n])
    assert f"imagegen runs {folder}" in done.stdout


def test_runs_of_a_sweep_share_a_group(tmp_path: Path, forks: Forks) -> None:
    """In wandb, each run is one of its own, in the sweep's group."""
    script = """
import sys
import wandb
groups = []
start = wandb.init
def init(**options):
    groups.append(options.get("group"))
    return start(**options)
wandb.init = init
import train
train.main()
print("groups", groups)
"""
    small = [text for text in SMALL if not text.startswith(("logger", "callbacks"))]
    arguments = ["--multirun", *small, "trainer.max_epochs=1", "callbacks.grids=null", "seed=0,1"]
    arguments.append(f"hydra.sweep.dir={tmp_path / 'day' / 'time'}")
    done = forks.run(script, *arguments, env={"WANDB_SERVICE": None})
    assert done.returncode == 0, done.stderr
    assert "groups ['day time', 'day time']" in done.stdout
    identities = {path.name for path in tmp_path.glob("day/time/*/wandb/offline-run-*")}
    assert len(identities) == 2


@pytest.mark.parametrize(
    ("sweep", "package", "what"),
    [
        ("optuna", "hydra-optuna-sweeper", "-e '.[optuna]'"),
        ("ray", "hydra-ray-launcher", "hydra-ray-launcher"),
        ("slurm", "hydra-submitit-launcher", "-e '.[slurm]'"),
    ],
)
def test_a_missing_engine_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sweep: str,
    package: str,
    what: str,
) -> None:
    if _is_installed(package.replace("-", "_")):
        pytest.skip(f"{package} is installed")
    arguments = ["--multirun", f"sweep={sweep}", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert run_train(monkeypatch, *arguments) == 1
    error = capsys.readouterr().err
    assert f"needs the package {package}; install it with pip install {what}." in error
    assert not (tmp_path / "sweep").exists()


def _wait_for_lines(path: Path, count: int, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not path.exists() or path.read_text().count("\n") < count:
        assert time.monotonic() < until, path
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(not _is_installed("hydra_submitit_launcher"), reason="needs the extra slurm")
def test_jobs_of_slurm_go_on_where_they_were_stopped(tmp_path: Path) -> None:
    """submitit's jobs, on a SLURM of the test's own, warned as SLURM warns: by SIGUSR2."""
    environment, state = slurm.install(tmp_path), tmp_path / "state"
    folder = tmp_path / "day" / "time"
    small = [text for text in SMALL if not text.startswith(("logger", "callbacks", "trainer.max"))]
    options = ["--multirun", "sweep=slurm", *small, "callbacks.grids=null", "logger=csv"]
    options += ["trainer.log_every_n_steps=1", "seed=0,1", f"hydra.sweep.dir={folder}"]
    options += ["trainer.max_epochs=-1", "trainer.max_steps=400", "scheduler=constant"]
    sweep = subprocess.Popen(
        [sys.executable, "train.py", *options],
        cwd=PROJECT_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait_for_lines(folder / "0" / "metrics.csv", 20)
    os.kill(int((state / "100_0.pid").read_text()), signal.SIGUSR2)
    printed, error = sweep.communicate(timeout=600)
    assert sweep.returncode == 0, error
    # A job ends after its result has been read.
    _wait_for_lines(state / "100_0.statuses", 2)
    assert (state / "100_0.statuses").read_text().split() == ["1", "0"]
    _wait_for_lines(state / "100_1.statuses", 1)
    assert (state / "100_1.statuses").read_text().split() == ["0"]
    log = (folder / ".submitit" / "100_0" / "100_0_0_log.err").read_text()
    assert "stopping after this step\n" in log
    assert "SLURM runs job 100_0 again" in log
    for number in (0, 1):
        with open(folder / str(number) / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["step"]) for row in rows] == list(range(400))
        summary = json.loads((folder / str(number) / "summary.json").read_text())
        assert (summary["state"], summary["steps"]) == ("finished", 400)
    assert f"imagegen runs {folder}" in printed
