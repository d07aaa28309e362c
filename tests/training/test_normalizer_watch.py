"""`callbacks=debug` logs the least normaliser of linear attention while a model trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from imagegen.training.normalizer_watch import METRIC, NormalizerWatch
from tests.helpers import SMALL, read_rows, run_train

HYBRID = ["attention=hybrid", "attention.pattern=[linear,softmax]", "model.n_layers=3"]


def _logged(folder: Path) -> dict[int, float]:
    return {int(row["step"]): float(row[METRIC]) for row in read_rows(folder) if row.get(METRIC)}


@pytest.mark.parametrize(("accumulated", "steps"), [(1, [1, 3, 5, 7, 9, 11]), (3, [1, 3])])
def test_the_least_normaliser_reaches_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulated: int, steps: list[int]
) -> None:
    seen: list[float] = []
    observe = NormalizerWatch._observe

    def noting(self: NormalizerWatch, normalizer: Tensor) -> None:
        seen.append(normalizer.min().item())
        observe(self, normalizer)

    monkeypatch.setattr(NormalizerWatch, "_observe", noting)
    options = [*HYBRID, "callbacks=debug", f"trainer.accumulate_grad_batches={accumulated}"]
    assert run_train(monkeypatch, *SMALL, *options, f"hydra.run.dir={tmp_path / 'run'}") == 0
    # Twelve training batches through two layers; validations and drawings are not looked at.
    assert len(seen) == 24
    a_row = 2 * 2 * accumulated
    expected = [min(seen[start : start + a_row]) for start in range(0, len(seen), a_row)]
    logged = _logged(tmp_path / "run")
    assert list(logged) == steps
    assert list(logged.values()) == pytest.approx(expected)
    assert min(logged.values()) > 0


def test_it_is_off_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    assert run_train(monkeypatch, *SMALL, "trainer.max_epochs=1", f"hydra.run.dir={run}") == 0
    assert METRIC not in read_rows(run)[0]


def test_a_model_without_linear_attention_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = ["attention=softmax", "callbacks=debug", "trainer.max_epochs=1"]
    assert run_train(monkeypatch, *SMALL, *options, f"hydra.run.dir={run}") == 0
    told = [line for line in capfd.readouterr().err.splitlines() if METRIC in line]
    assert told == [
        f"{METRIC} is not logged: this model has no linear attention, whose normalisers it watches"
    ]
    assert METRIC not in read_rows(run)[0]
