"""A run that never validates keeps its weights all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers import SMALL, read_weights, run_train

NEVER = [
    "trainer.limit_val_batches=0",
    "trainer.check_val_every_n_epoch=null",
    "trainer.val_check_interval=4",
]


def _run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> Path:
    assert run_train(monkeypatch, *SMALL, *NEVER, f"hydra.run.dir={folder}", *options) == 0
    return folder


def _step(folder: Path) -> int:
    content = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    return int(content["global_step"])


@pytest.mark.parametrize("limit", ["trainer.max_steps=5", "trainer.max_epochs=1"])
def test_the_last_step_is_kept(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(monkeypatch, tmp_path / "run", limit)
    assert _step(run) == (5 if "steps" in limit else 6)
    assert [file.name for file in (run / "checkpoints").iterdir()] == ["last.ckpt"]


def test_going_on_takes_the_steps_of_a_run_that_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A schedule that does not depend on the limit.
    options = ["scheduler=constant", "model.dropout=0.1"]
    whole = _run(monkeypatch, tmp_path / "whole", "trainer.max_steps=30", *options)
    parts = _run(monkeypatch, tmp_path / "parts", "trainer.max_steps=7", *options)
    _run(monkeypatch, parts, "trainer.max_steps=30", f"resume={parts}", *options)
    for name, value in read_weights(whole).items():
        assert torch.equal(value, read_weights(parts)[name]), name
