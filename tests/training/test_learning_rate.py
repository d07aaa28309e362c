"""`imagegen find-lr`: a rate is suggested, and nothing is left behind."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from imagegen.commands import find_lr as command
from imagegen.training import learning_rate as find_lr
from tests.helpers import SMALL, run_main


def _run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    return run_main(monkeypatch, command.main, "find_lr", *options)


def test_a_rate_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run(monkeypatch, *SMALL[:6], "batch_size=8") == 0
    printed = capsys.readouterr().out
    found = re.search(r"suggested: optimizer.lr=(\S+) \(", printed)
    assert found
    # A tenth of it hardly trains so small a model; Lightning's own finder suggested that.
    assert 4e-4 < float(found[1]) < 0.1
    rows = re.findall(r"^ +(\S+e-\d+) +(\d+\.\d+)$", printed, re.MULTILINE)
    assert len(rows) >= command.ROWS - 2
    # The loss falls from where a new model is.
    assert min(float(loss) for _, loss in rows) < float(rows[0][1]) - 0.2
    assert not list(tmp_path.iterdir())


def test_rates_grow_in_their_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("optimizer=muon", "optimizer.lr=0.02", "optimizer.adam_lr=0.004")
    assert _run(monkeypatch, *SMALL[:6], "batch_size=8", *options) == 0
    found = re.search(r"optimizer.lr=(\S+) optimizer.adam_lr=(\S+) ", capsys.readouterr().out)
    assert found
    assert float(found[2]) == pytest.approx(float(found[1]) / 5, rel=0.06)


@pytest.mark.parametrize("centre", [1e-4, 1e-3, 3e-2])
def test_the_loss_falls_fastest_where_it_does(centre: float) -> None:
    rates = np.geomspace(find_lr.LEAST, find_lr.MOST, find_lr.STEPS)
    # A step down over the logarithm of the rate, and what batches differ by.
    losses = 3 - np.tanh(2 * np.log10(rates / centre))
    losses += np.random.default_rng(0).normal(0, 0.02, len(losses))
    rows, best = find_lr.steepest(rates.tolist(), losses.tolist())
    assert best is not None
    assert 0.7 < best / centre < 1.4
    assert all(abs(loss - 3 + np.tanh(2 * np.log10(r / centre))) < 0.1 for r, loss in rows)


def test_no_rate_where_the_loss_does_not_fall() -> None:
    rates = np.geomspace(find_lr.LEAST, find_lr.MOST, find_lr.STEPS).tolist()
    assert find_lr.steepest(rates, list(range(find_lr.STEPS)))[1] is None
    assert find_lr.steepest(rates[:8], [1.0] * 8) == ([], None)


def test_mistakes_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "atention=linear") == 1
    assert "attention" in capsys.readouterr().err
    for rate in ("0", "inf", "1e-320"):
        assert _run(monkeypatch, f"optimizer.lr={rate}") == 1
        assert f"optimizer.lr={rate} must be a number above 0" in capsys.readouterr().err
    assert _run(monkeypatch, "--help") == 0
    assert "imagegen find-lr dataset=mnist" in capsys.readouterr().out
