"""The logged norm of the gradients is that of the loss, in every arithmetic."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.helpers import SMALL, run_train


def test_the_scale_of_float16_is_not_in_the_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where PyTorch unscales the gradients before the optimizer nor where that does it."""
    runs = {"32-true": "", "16-mixed": "optimizer.fused=true", "16": "optimizer.fused=false"}
    found = {}
    for precision, optimizer in runs.items():
        run = tmp_path / precision
        options = [f"trainer.precision={precision}", f"hydra.run.dir={run}", "logger=csv"]
        options += ["trainer.max_epochs=1", "trainer.limit_val_batches=0", *optimizer.split()]
        assert run_train(monkeypatch, *SMALL, *options) == 0
        rows = csv.DictReader((run / "metrics.csv").read_text().splitlines())
        norms = [row["train/gradient_norm"] for row in rows]
        found[precision] = [float(norm) for norm in norms if norm]
    assert len(found["32-true"]) == 3
    for norms in found.values():
        assert norms == pytest.approx(found["32-true"], rel=0.02)
