"""The average of the weights: what is evaluated, drawn from and kept, and resuming with it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.core.errors import UserError
from imagegen.training.averaging import WeightAverage, weight_average
from imagegen.training.module import ImageModule
from tests.helpers import SMALL, run_train


class Witness(Callback):
    """Keeps the weights after each step, and those that validation and its end see."""

    def __init__(self) -> None:
        self.trained: list[torch.Tensor] = []
        self.validated: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: ImageModule, *args: Any) -> None:
        self.trained.append(pl_module.model.norm.weight.detach().clone())

    def on_validation_batch_end(self, trainer: Any, pl_module: ImageModule, *args: Any) -> None:
        self.validated.append(pl_module.model.norm.weight.detach().clone())


def _train(monkeypatch: pytest.MonkeyPatch, run: Path, *options: str) -> int:
    arguments = [*SMALL, "callbacks.ema.decay=0.8", f"hydra.run.dir={run}", *options]
    return run_train(monkeypatch, *arguments)


def _content(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    return content


def test_the_average_is_what_is_validated_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = Witness()
    monkeypatch.setattr(
        "tests.training.test_averaging.make_witness", lambda: witness, raising=False
    )
    status = _train(
        monkeypatch,
        tmp_path / "run",
        "trainer.max_epochs=1",
        "+callbacks.witness._target_=tests.training.test_averaging.make_witness",
    )
    assert status == 0
    average = witness.trained[0].clone()
    for t, weights in enumerate(witness.trained[1:], start=1):
        decay = min(0.8, (1 + t) / (10 + t))
        average = decay * average + (1 - decay) * weights
    torch.testing.assert_close(witness.validated[-1], average)
    kept = load_checkpoint(tmp_path / "run").model.norm.weight
    torch.testing.assert_close(kept, average)
    content = _content(tmp_path / "run")
    trained = content["current_model_state"]["model.norm.weight"]
    torch.testing.assert_close(trained, witness.trained[-1])
    assert not torch.allclose(trained, average)


def test_resuming_goes_on_with_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["scheduler=constant", "trainer.max_epochs=2"]
    assert not _train(monkeypatch, tmp_path / "whole", *options)

    class Stop(Callback):
        armed = True

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 9 and Stop.armed:
                Stop.armed = False
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("tests.training.test_averaging.make_stop", Stop, raising=False)
    parts = [*options, "+callbacks.stop._target_=tests.training.test_averaging.make_stop"]
    assert _train(monkeypatch, tmp_path / "parts", *parts) == 130
    assert not _train(monkeypatch, tmp_path / "parts", *parts, f"resume={tmp_path / 'parts'}")
    whole, parts_content = _content(tmp_path / "whole"), _content(tmp_path / "parts")
    for key in ("state_dict", "current_model_state"):
        for name, value in whole[key].items():
            assert torch.equal(value, parts_content[key][name]), (key, name)


def test_an_error_in_validation_keeps_the_trained_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the last checkpoint: one of a half done validation would skip it when resumed."""
    witness = Witness()

    class Fail(Callback):
        def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 12:
                raise RuntimeError("a disk fell down")

    monkeypatch.setattr(
        "tests.training.test_averaging.make_witness", lambda: witness, raising=False
    )
    monkeypatch.setattr("tests.training.test_averaging.make_fail", Fail, raising=False)
    status = _train(
        monkeypatch,
        tmp_path / "run",
        "+callbacks.witness._target_=tests.training.test_averaging.make_witness",
        "+callbacks.fail._target_=tests.training.test_averaging.make_fail",
    )
    assert status == 1
    content = _content(tmp_path / "run")
    state = content["current_model_state"]
    assert content["global_step"] == 6
    torch.testing.assert_close(state["model.norm.weight"], witness.trained[5])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["state"] == "failed"


def test_no_decay_is_no_average() -> None:
    assert not isinstance(weight_average(None), WeightAverage)
    assert isinstance(weight_average(0.99), WeightAverage)
    for decay in (1.0, -0.1):
        with pytest.raises(UserError, match="must be at least 0 and below 1"):
            weight_average(decay)
