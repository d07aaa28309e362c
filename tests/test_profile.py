"""The profiler's report: kept in the run folder and shown, also of an interrupted run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers import run_train
from tests.test_run import SMALL, Interrupt

PROFILED = [*(text for text in SMALL if "grids" not in text), "callbacks.grids=null"]


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule will be overridden")
@pytest.mark.parametrize(
    ("profiler", "action"),
    [
        ("simple", "run_training_batch"),
        ("advanced", "run_training_batch"),
        ("pytorch", "aten::linear"),
    ],
)
def test_the_report_is_kept_and_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    profiler: str,
    action: str,
) -> None:
    run = tmp_path / "run"
    options = [*PROFILED, f"+trainer.profiler={profiler}", f"hydra.run.dir={run}"]
    assert run_train(monkeypatch, *options) == 0
    printed = capsys.readouterr().out
    assert action in (run / "profile.txt").read_text()
    assert f"{run / 'profile.txt'} begins:\n  FIT Profiler Report\n" in printed


def test_an_interrupted_run_has_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(Interrupt, "armed", True)
    interrupt = "+callbacks.interrupt._target_=tests.test_run.Interrupt"
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
