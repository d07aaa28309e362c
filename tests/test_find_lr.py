"""`python -m imagegen.find_lr`: a rate is suggested, and nothing is left behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from imagegen import find_lr
from tests.helpers import run_main
from tests.test_run import SMALL


def _run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    return run_main(monkeypatch, find_lr.main, "find_lr", *options)


def test_a_rate_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run(monkeypatch, *SMALL[:6], "batch_size=8") == 0
    printed = capsys.readouterr().out
    found = re.search(r"suggested: optimizer.lr=(\S+) ", printed)
    assert found
    assert find_lr.LEAST < float(found[1]) < find_lr.MOST
    rows = re.findall(r"^ +(\S+e-\d+) +(\d+\.\d+)$", printed, re.MULTILINE)
    assert len(rows) >= find_lr.ROWS - 2
    # The loss falls from where a new model is.
    assert min(float(loss) for _, loss in rows) < float(rows[0][1]) - 0.2
    assert not list(tmp_path.iterdir())


def test_mistakes_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "atention=linear") == 1
    assert "attention" in capsys.readouterr().err
    assert _run(monkeypatch, "--help") == 0
    assert "python -m imagegen.find_lr dataset=mnist" in capsys.readouterr().out
