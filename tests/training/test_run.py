"""Training runs through the command line: what they leave behind, and going on with them."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from pytorch_lightning import Callback

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.checkpoint.training_data import build_dataset
from imagegen.cli.entry import compose
from imagegen.core.build import build_section, check_section
from imagegen.core.durations import parse_duration
from imagegen.core.errors import UserError
from imagegen.data.datamodule import ImageDataModule
from imagegen.data.digits import Digits
from imagegen.tracking.curves import curves
from imagegen.training.optimizers import optimizer_factory
from tests.helpers import (
    DRAWING,
    SMALL,
    Interrupt,
    assert_refused,
    read_rows,
    read_weights,
    run_train,
    tiny_model,
)

FOLDER = {"_target_": "imagegen.data.image_folder.ImageFolder", "size": [4, 4]}


def test_a_run_leaves_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    status = run_train(monkeypatch, *DRAWING, f"hydra.run.dir={run}", "seed=3")
    printed = capsys.readouterr().out
    assert status == 0
    summary = json.loads((run / "summary.json").read_text())
    loaded = load_checkpoint(run)
    assert loaded.path == run / "checkpoints/best.ckpt"
    assert summary["state"] == "finished"
    assert summary["steps"] == 12
    assert summary["epochs"] == 2
    assert summary["seconds"] > 0
    assert summary["best_checkpoint"] == "checkpoints/best.ckpt"
    assert summary["parameters"] == sum(p.numel() for p in loaded.model.parameters())
    assert loaded.metadata["config"]["seed"] == 3
    assert "seed=3" in loaded.metadata["overrides"]
    assert (run / "config.yaml").exists()

    rows = read_rows(run)
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(set(steps))
    for name in ("train/bits_per_dim", "train/gradient_norm", "train/images_per_second"):
        assert sum(float(row[name]) > 0 for row in rows if row[name]) == 6
    validated = [float(row["val/bits_per_dim"]) for row in rows if row["val/bits_per_dim"]]
    assert len(validated) == 2
    assert min(validated) == pytest.approx(summary["best_bits_per_dim"])
    (curve,) = curves([run])
    assert curve.val.bits_per_dim.tolist() == validated
    assert summary["processes"] == 1
    np.testing.assert_array_equal(curve.train.images, curve.train.steps * 32)
    assert (np.diff(curve.train.seconds) > 0).all()

    pictures = sorted(path.name for path in (run / "samples").iterdir())
    assert pictures == [
        "step-0000006-completions.png",
        "step-0000006-samples.png",
        "step-0000012-completions.png",
        "step-0000012-samples.png",
    ]
    # The completions' first column holds validation images, stretched to 0..255 and enlarged x4.
    grid = np.asarray(Image.open(run / "samples" / pictures[0]))
    first = np.round(Digits().split("val").images[0, :, :, 0] * (255 / 16)).astype(np.uint8)
    assert np.array_equal(grid[2:34:4, 2:34:4], first)

    assert f"{summary['best_bits_per_dim']:.4f} bits/dim" in printed
    assert f"python sample.py ckpt={run} n=64" in printed


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 1e-3)])
def test_the_best_score_is_that_of_the_best_checkpoint(
    precision: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is evaluated in float32, whatever it was trained and validated in."""
    run = tmp_path / "run"
    options = [f"trainer.precision={precision}", f"hydra.run.dir={run}", "eval_batch_size=50"]
    assert run_train(monkeypatch, *SMALL, *options) == 0
    images = torch.from_numpy(Digits().split("val").images[:50])
    with torch.no_grad():
        score = load_checkpoint(run).model.bits_per_dim(images).double().mean().item()
    best = json.loads((run / "summary.json").read_text())["best_bits_per_dim"]
    assert score == pytest.approx(best, rel=tolerance)


@pytest.mark.parametrize("head", ["mixture_of_logistics", "categorical"])
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_attentions_and_heads_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str, head: str
) -> None:
    run = tmp_path / "run"
    status = run_train(
        monkeypatch,
        *DRAWING,
        f"attention={attention}",
        f"head={head}",
        "trainer.max_epochs=5",
        "optimizer.lr=0.01",
        "callbacks.grids.every=5",
        f"hydra.run.dir={run}",
    )
    assert status == 0
    scores = [float(row["val/bits_per_dim"]) for row in read_rows(run) if row["val/bits_per_dim"]]
    assert scores[-1] < scores[0] < 4.2
    assert len(list((run / "samples").iterdir())) == 2


def test_a_seed_gives_its_weights_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever random numbers the process has drawn before; another seed gives others."""
    options = [*SMALL, "model.dropout=0.2", "model.flips=true"]
    options += ["trainer.max_epochs=1", "callbacks.ema.decay=0.9"]
    found = []
    for name, seed in (("one", 3), ("other", 3), ("third", 4)):
        torch.rand(len(name))
        run = tmp_path / name
        assert run_train(monkeypatch, *options, f"seed={seed}", f"hydra.run.dir={run}") == 0
        saved = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
        found.append({**saved["state_dict"], **saved["current_model_state"]})
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert not any(
        torch.equal(value, found[2][key]) for key, value in found[0].items() if value.ndim > 1
    )


def _continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *limits: tuple[str, ...]
) -> tuple[Path, Path]:
    """An uninterrupted run, and one that was stopped after each of `limits` but the last."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    shared = [*DRAWING, "scheduler=constant", "model.dropout=0.2", "trainer.log_every_n_steps=1"]
    assert run_train(monkeypatch, *shared, *limits[-1], f"hydra.run.dir={whole}") == 0
    run_train(monkeypatch, *shared, *limits[0], f"hydra.run.dir={parts}")
    for limit in limits[1:]:
        assert run_train(monkeypatch, *limit, f"resume={parts}") == 0
    return whole, parts


def _assert_same_run(whole: Path, parts: Path) -> None:
    for row, expected in zip(read_rows(parts), read_rows(whole), strict=True):
        for name in ("step", "epoch", "train/bits_per_dim", "val/bits_per_dim", "lr-AdamW"):
            assert row[name] == expected[name], (expected["step"], name)
    resumed = read_weights(parts)
    assert all(torch.equal(resumed[name], value) for name, value in read_weights(whole).items())


def test_a_resumed_run_goes_on_as_if_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = _continued(
        tmp_path,
        monkeypatch,
        ("trainer.max_epochs=1",),
        ("trainer.max_epochs=2",),
        ("trainer.max_epochs=3",),
    )
    _assert_same_run(whole, parts)
    assert json.loads((parts / "summary.json").read_text())["steps"] == 18


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_goes_on_in_the_middle_of_an_epoch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    monkeypatch.setattr(Interrupt, "number", number)
    interrupt = ("+callbacks.interrupt._target_=tests.helpers.Interrupt",)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    shared = [*SMALL, "scheduler=constant", "trainer.log_every_n_steps=1"]
    assert run_train(monkeypatch, *shared, f"hydra.run.dir={whole}") == 0
    Interrupt.armed = True
    assert run_train(monkeypatch, *shared, *interrupt, f"hydra.run.dir={parts}") == 130
    assert f"to continue: python train.py resume={parts}" in capfd.readouterr().err
    assert json.loads((parts / "summary.json").read_text())["state"] == "interrupted"
    # Code from elsewhere is not taken from a checkpoint.
    assert run_train(monkeypatch, f"resume={parts}") == 1
    assert "if you trust it, type it again" in capfd.readouterr().err
    assert run_train(monkeypatch, *interrupt, f"resume={parts}") == 0
    _assert_same_run(whole, parts)
    assert json.loads((parts / "summary.json").read_text())["state"] == "finished"


def test_steps_and_time_end_a_run_with_a_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = [*SMALL, "trainer.max_epochs=-1"]
    for name, limit in (("steps", "trainer.max_steps=8"), ("time", "trainer.max_time=00:00:00:01")):
        run = tmp_path / name
        assert run_train(monkeypatch, *endless, limit, f"hydra.run.dir={run}") == 0
        summary = json.loads((run / "summary.json").read_text())
        assert summary["steps"] == 8 if name == "steps" else summary["seconds"] >= 1
        assert read_rows(run)[-1]["val/bits_per_dim"]
        rates = [float(row["lr-AdamW"]) for row in read_rows(run) if row["lr-AdamW"]]
        assert rates[-1] < 0.5 * max(rates)
        assert summary["best_bits_per_dim"] is not None
        assert (run / "checkpoints/last.ckpt").exists()


def test_bad_resumes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert run_train(monkeypatch, *SMALL, "trainer.max_epochs=1", f"hydra.run.dir={run}") == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capfd.readouterr()
    for arguments, sentence in (
        ([f"resume={run}"], "has already finished (trainer.max_epochs=1)"),
        (
            [f"resume={run}", "model.n_layers=2"],
            "cannot be resumed with model.n_layers=2 (it has 1)",
        ),
        ([f"resume={run}", "attention=softmax"], "cannot be resumed with attention._target_="),
        ([f"resume={tmp_path / 'nothing'}"], "does not exist"),
        ([f"hydra.run.dir={run}", *SMALL], "of an earlier run"),
    ):
        assert run_train(monkeypatch, *arguments) == 1
        error = capfd.readouterr().err
        assert sentence in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_an_option_of_another_choice_is_named_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    typed = ["attention=softmax", "attention.feature_map=relu", f"hydra.run.dir={tmp_path / 'run'}"]
    assert run_train(monkeypatch, *SMALL, *typed) == 1
    assert "the attention chosen has no such option; another choice" in capfd.readouterr().err


def test_a_run_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("imagegen.training.module.ImageModule.training_step", fail)
    assert run_train(monkeypatch, *SMALL, f"hydra.run.dir={run}") == 1
    assert json.loads((run / "summary.json").read_text())["state"] == "failed"


# What is checked where the run is prepared; the checks of single sections are called below.
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("seed=-1", "seed=-1 must be a whole number from 0 to"),
        ("seed=5000000000", "seed=5000000000 must be a whole number from 0 to"),
        ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val=-1 must be a number of at"),
        ("trainer.gradient_clip_val=nan", "trainer.gradient_clip_val=nan must be a number of"),
        ("model.d_model=40000000", "memory does not suffice"),
        ("dataset=image_folder", "dataset.root"),
    ],
)
def test_bad_settings_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    override: str,
    sentence: str,
) -> None:
    assert_refused(monkeypatch, capfd, tmp_path / "run", override, sentence)


def _section(name: str, **changed: Any) -> dict[str, Any]:
    """A section of the default configuration with some options changed."""
    return {**cast(Any, OmegaConf.to_container(compose("train")[name])), **changed}


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (lambda: ImageDataModule(Digits(), 0), "batch_size=0"),
        (
            lambda: optimizer_factory(
                OmegaConf.create({"optimizer": _section("optimizer", lr=-1)}),
                tiny_model(Digits().spec),
            ),
            "the optimizer rejects its settings: Invalid learning rate",
        ),
        (
            lambda: check_section("trainer", _section("trainer", num_sanity_val_steps=[1])),
            "trainer takes num_sanity_val_steps as a whole number",
        ),
        (
            lambda: build_section(
                {**_section("callbacks")["ema"], "decay": "x"}, "callbacks.ema", Callback
            ),
            "callbacks.ema takes decay as a number or null, not 'x'",
        ),
        (
            lambda: build_section(
                {**_section("callbacks")["best"], "filename": 0.5}, "callbacks.best", Callback
            ),
            "callbacks.best takes filename as a word or null, not 0.5",
        ),
        (
            lambda: tiny_model(Digits().spec, residual_scale=float("nan")),
            "model.residual_scale=nan must be a finite number",
        ),
        (lambda: tiny_model(Digits().spec, n_layers=0), "model.n_layers=0 must be at least 1"),
        (lambda: tiny_model(Digits().spec, n_heads=3), "n_heads=3 does not divide d_model=16"),
        (
            lambda: build_dataset({**FOLDER, "root": "nowhere"}, None, []).prepare(),
            "nowhere",
        ),
        (
            lambda: parse_duration("trainer.max_time", "00:00:00:00"),
            "trainer.max_time=00:00:00:00 leaves no time to train",
        ),
        (
            lambda: parse_duration("trainer.max_time", "1h"),
            "trainer.max_time=1h must be days:hours:minutes:seconds",
        ),
    ],
)
def test_settings_that_are_checked_by_themselves(
    check: Callable[[], object], sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        check()
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_optimizers_are_given_plain_lists() -> None:
    """PyTorch 2.9 keeps them as they are, and of OmegaConf's no checkpoint could be read."""
    factory = build_section(compose("train").optimizer, "optimizer", Callable)
    assert type(factory.keywords["betas"]) is list


def test_an_interrupt_while_libraries_load_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Loading(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setattr(logging, "disable", lambda: None)
    monkeypatch.setitem(sys.modules, "imagegen.training.run", Loading("loading"))
    assert run_train(monkeypatch, *SMALL, f"hydra.run.dir={tmp_path / 'run'}") == 130
    assert capsys.readouterr().err == "\ninterrupted\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("found", ["", "outputs"])
def test_a_refused_run_leaves_the_folders_that_it_found(
    found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / found).mkdir(exist_ok=True)
    run = tmp_path / "outputs" / "today" / "run"
    assert run_train(monkeypatch, *SMALL, "optimizer.lr=-1", f"hydra.run.dir={run}") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ([found] if found else [])
