"""The profiler's report: kept in the run folder and shown, also of an interrupted run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.forks import TRAIN, Forks
from tests.helpers import SMALL, Interrupt, run_train

PROFILED = SMALL


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_the_report_is_kept_and_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    profiler: str,
) -> None:
    run = tmp_path / "run"
    options = [*PROFILED, f"+trainer.profiler={profiler}", f"hydra.run.dir={run}"]
    assert run_train(monkeypatch, *options) == 0
    printed = capsys.readouterr().out
    assert "run_training_batch" in (run / "profile.txt").read_text()
    assert f"{run / 'profile.txt'} begins:\n  FIT Profiler Report\n" in printed


def test_the_report_of_pytorch(tmp_path: Path, forks: Forks) -> None:
    """In a process of its own: PyTorch 2.14 crashes where the test's process is profiled."""
    run = tmp_path / "run"
    options = [*PROFILED, "+trainer.profiler=pytorch", f"hydra.run.dir={run}"]
    done = forks.run(TRAIN, *options)
    assert done.returncode == 0, done.stderr
    # Which operations are in its few rows depends on their times.
    assert "aten::" in (run / "profile.txt").read_text()
    assert f"{run / 'profile.txt'} begins:\n  FIT Profiler Report\n" in done.stdout
    assert "getting object" not in done.stderr


def test_an_interrupted_run_has_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(Interrupt, "armed", True)
    interrupt = "+callbacks.interrupt._target_=tests.helpers.Interrupt"
    options = [*PROFILED, interrupt, "+trainer.profiler=simple", f"hydra.run.dir={run}"]
    assert run_train(monkeypatch, *options) == 130
    printed = capsys.readouterr().out
    assert "run_training_batch" in (run / "profile.txt").read_text()
    assert "FIT Profiler Report" in printed
    before = (run / "profile.txt").stat()
    # It has nothing to do any more, and changes no file of the run.
    assert run_train(monkeypatch, f"resume={run}", "trainer.max_epochs=1") == 1
    assert (run / "profile.txt").stat().st_mtime_ns == before.st_mtime_ns


def test_a_try_shows_it_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["+trainer.profiler=simple", "+trainer.fast_dev_run=true"]
    assert run_train(monkeypatch, *PROFILED, *options, f"hydra.run.dir={tmp_path / 'run'}") == 0
    assert "the profile begins:\n  FIT Profiler Report" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []
