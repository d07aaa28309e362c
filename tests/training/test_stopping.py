"""A loss or gradient that is not a number stops a run, or its step is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.training.module import ImageModule
from tests.helpers import SMALL, run_train


class Poison(Callback):
    """Spoils a gradient (or the loss of the validation) in some steps, and keeps the weights."""

    steps: tuple[int, ...] = ()
    value = float("nan")
    validation = False

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_after_backward(self, trainer: Any, pl_module: ImageModule) -> None:
        self.weights.append(pl_module.model.norm.weight.detach().clone())
        if trainer.global_step in Poison.steps:
            gradient = pl_module.model.norm.weight.grad
            assert gradient is not None
            gradient[0] = Poison.value

    def on_validation_start(self, trainer: Any, pl_module: ImageModule) -> None:
        if Poison.validation:
            pl_module.model.norm.weight.data.fill_(float("nan"))


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    poison = Poison()
    monkeypatch.setattr("tests.training.test_stopping.make", lambda: poison, raising=False)
    monkeypatch.setattr(Poison, "steps", (3,))
    return poison


def _train(monkeypatch: pytest.MonkeyPatch, run: Path, *options: str) -> int:
    poisoned = "+callbacks.poison._target_=tests.training.test_stopping.make"
    arguments = [*SMALL, "trainer.max_epochs=1", poisoned, f"hydra.run.dir={run}", *options]
    return run_train(monkeypatch, *arguments)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_stop_names_step_images_and_checkpoint(
    poison: Poison,
    value: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Poison, "value", value)
    assert _train(monkeypatch, tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert (
        "error: the loss or a gradient is not a number at step 4, with the training images ["
        in error
    )
    last = tmp_path / "run" / "checkpoints/last.ckpt"
    assert f"and the last checkpoint is {last}" in error
    assert "on_nan=skip" in error
    assert "Traceback" not in error
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("failed", 3)
    # What the failed run leaves is from before its first step: later weights may be the cause.
    assert torch.equal(load_checkpoint(last).model.norm.weight, poison.weights[0])


def test_all_batches_of_a_step_are_named(
    poison: Poison,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Poison, "steps", (1,))
    assert _train(monkeypatch, tmp_path / "run", "trainer.accumulate_grad_batches=2") == 1
    error = capsys.readouterr().err
    assert "not a number at step 2" in error
    named = error.partition("training images [")[2].partition("]")[0].split(", ")
    assert len(set(named)) == 64


def test_skip_leaves_the_step_out(
    poison: Poison,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _train(monkeypatch, tmp_path / "run", "on_nan=skip") == 0
    assert "not a number at step 4" in capsys.readouterr().out
    assert torch.equal(poison.weights[3], poison.weights[4])
    assert not torch.equal(poison.weights[4], poison.weights[5])
    assert "train/skipped_steps" in (tmp_path / "run" / "metrics.csv").read_text()
    assert load_checkpoint(tmp_path / "run").model.norm.weight.isfinite().all()


def test_skipping_has_an_end(
    poison: Poison,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Poison, "steps", tuple(range(100)))
    options = ("on_nan=skip", "trainer.limit_train_batches=20")
    assert _train(monkeypatch, tmp_path / "run", *options) == 1
    assert "for the 10th time in a row" in capsys.readouterr().err


def test_a_diverged_validation_stops(
    poison: Poison,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Poison, "steps", ())
    monkeypatch.setattr(Poison, "validation", True)
    assert _train(monkeypatch, tmp_path / "run") == 1
    assert "the validation after step 6 gives nan bits/dim" in capsys.readouterr().err


def test_other_policies_are_refused(
    poison: Poison,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _train(monkeypatch, tmp_path / "run", "on_nan=ignore") == 1
    assert "on_nan=ignore is unknown; it can be stop or skip" in capsys.readouterr().err


@pytest.mark.parametrize("fused", [True, False])
def test_lowering_the_scale_has_an_end(
    fused: bool,
    poison: Poison,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Gradients that are not numbers at any scale of the loss."""
    monkeypatch.setattr(Poison, "steps", tuple(range(2, 100)))
    options = ("trainer.precision=16-mixed", f"optimizer.fused={fused}")
    options += ("trainer.limit_train_batches=40", "batch_size=4")
    assert _train(monkeypatch, tmp_path / "run", *options) == 1
    error = capsys.readouterr().err
    # 65,536 has been halved sixteen times.
    assert "not a number at step 19, with the training images [" in error
    assert "trainer.precision=bf16-mixed" in error
    assert torch.equal(poison.weights[2], poison.weights[-1])
    assert not torch.equal(poison.weights[1], poison.weights[2])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_bad_loss_is_noticed_in_float16_too(
    policy: str,
    fused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = ImageModule.training_step

    def spoil(self: ImageModule, *args: Any) -> torch.Tensor:
        return step(self, *args) * (float("nan") if self.trainer.global_step == 3 else 1)

    monkeypatch.setattr(ImageModule, "training_step", spoil)
    run = tmp_path / "run"
    options = ("trainer.precision=16-mixed", f"optimizer.fused={fused}", f"on_nan={policy}")
    arguments = [*SMALL, "trainer.max_epochs=1", f"hydra.run.dir={run}", *options]
    assert run_train(monkeypatch, *arguments) == (1 if policy == "stop" else 0)
    said = capsys.readouterr()
    assert "not a number at step 4" in (said.err if policy == "stop" else said.out)
    if policy == "skip":
        assert "train/skipped_steps" in (run / "metrics.csv").read_text()
        assert load_checkpoint(run).model.norm.weight.isfinite().all()
