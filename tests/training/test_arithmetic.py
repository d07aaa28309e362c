"""Each arithmetic with each optimizer, from the first step to an export, and each part in each.

The default of a machine, `trainer.precision=auto`, is one of these; tests/core/test_machine.py
tells which, and trains as users get it in both.
"""

from __future__ import annotations

import copy
import csv
import functools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from pytorch_lightning import Callback, Trainer
from torch import Tensor

from imagegen.checkpoint import export
from imagegen.checkpoint.reading import load_checkpoint
from imagegen.cli.entry import PROJECT_ROOT, compose
from imagegen.core.machine import training_precision
from imagegen.core.values import plain
from imagegen.data.digits import Digits
from imagegen.evaluation import scores as evaluate
from imagegen.model.transformer import ImageTransformer
from imagegen.training import learning_rate as find_lr
from imagegen.training.lightning_fixes import quiet_lightning
from imagegen.training.model_options import model_options
from imagegen.training.module import ImageModule
from imagegen.training.normalizer_watch import METRIC
from imagegen.training.optimizers import build_optimizer
from tests.helpers import read_images, run_train, sample, tiny_model

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
OPTIMIZERS = sorted(path.stem for path in (PROJECT_ROOT / "conf/optimizer").glob("*.yaml"))
ATTENTIONS = sorted(path.stem for path in (PROJECT_ROOT / "conf/attention").glob("*.yaml"))
CLIP = 0.5
TINY = [
    "model.n_layers=1",
    "model.d_model=16",
    "model.n_heads=2",
    "model.d_ff=16",
    "batch_size=8",
    "trainer=cpu",
    "logger=none",
    "callbacks.grids=null",
    f"trainer.gradient_clip_val={CLIP}",
    "trainer.limit_train_batches=4",
    "trainer.limit_val_batches=1",
    "trainer.log_every_n_steps=1",
    "trainer.max_epochs=2",
]


class Stop(Callback):
    """Presses Ctrl-C in the middle of the second epoch, once."""

    armed = True
    step = 6

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == Stop.step and Stop.armed:
            Stop.armed = False
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def searching(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient scaler that begins where float16 overflows, and grows as soon as it does not."""
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**24, growth_interval=2)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)


def _content(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    return content


def _column(run: Path, name: str) -> list[float]:
    with open(run / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def _assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Containers with equal numbers and tensors, bit for bit."""
    assert type(found) is type(expected), where
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            _assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            _assert_same(found[number], value, f"{where}/{number}")
    else:
        assert found == expected, where


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.usefixtures("searching")
def test_from_the_first_step_to_an_export(
    precision: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # A head whose gradients let the scaler through in some of so few steps.
    head = "head=logistics"
    chosen = [*TINY, head, f"trainer.precision={precision}", f"optimizer={optimizer}"]
    assert run_train(monkeypatch, *chosen, f"hydra.run.dir={whole}") == 0

    monkeypatch.setattr(Stop, "armed", True)
    stop = "+callbacks.stop._target_=tests.training.test_arithmetic.Stop"
    assert run_train(monkeypatch, *chosen, stop, f"hydra.run.dir={parts}") == 130
    assert _content(parts)["global_step"] == 6
    assert run_train(monkeypatch, stop, f"resume={parts}") == 0

    expected, found = _content(whole), _content(parts)
    kept = ["state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"]
    if precision == "16-mixed":
        kept.append("MixedPrecision")
        # It has both lowered its scale and raised it again.
        assert expected["MixedPrecision"]["scale"] < 2.0**24
        assert expected["MixedPrecision"]["growth_interval"] == 2
    else:
        assert "MixedPrecision" not in expected
    for key in kept:
        _assert_same(found[key], expected[key], key)
    assert expected["global_step"] == 8
    assert expected["optimizer_states"][0]["state"]
    for name in ("train/bits_per_dim", "val/bits_per_dim", "train/gradient_norm"):
        assert _column(parts, name) == _column(whole, name)

    # Gradients as they are, unscaled, and all of them longer than what is left of them.
    norms = np.array(_column(whole, "train/gradient_norm"))
    assert len(norms) == 8
    assert (norms > CLIP).all()
    assert norms[np.isfinite(norms)].max() < 100
    assert bool(np.isinf(norms).any()) == (precision == "16-mixed")
    assert np.isfinite(norms).sum() >= 3

    images = read_images(sample(parts, tmp_path / "drawn", "n=2"))
    assert len(images) == 2
    completed = ("task=complete", "n=1", "completions=1")
    assert len(read_images(sample(parts, tmp_path / "completed", *completed))) == 2
    score = evaluate.run(compose("evaluate", [f"ckpt={parts}", "limit=5", "device=cpu"]))
    assert 0 < score["bits_per_dim"] < 8
    out = export.run(compose("export", [f"ckpt={parts}", f"out={tmp_path / 'exported'}"]))
    _assert_same(load_checkpoint(out).model.state_dict(), load_checkpoint(parts).model.state_dict())


@pytest.mark.parametrize("before", PRECISIONS)
def test_another_arithmetic_may_be_typed_when_resuming(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient scaler begins anew where there was none, and ends where it has nothing to do."""
    run = tmp_path / "run"
    options = [*TINY, "trainer.max_epochs=1", f"trainer.precision={before}"]
    assert run_train(monkeypatch, *options, f"hydra.run.dir={run}") == 0
    others = [precision for precision in PRECISIONS if precision != before]
    for epochs, precision in enumerate(others, start=2):
        typed = [f"trainer.precision={precision}", f"trainer.max_epochs={epochs}"]
        assert run_train(monkeypatch, f"resume={run}", *typed) == 0
        assert ("MixedPrecision" in _content(run)) == (precision == "16-mixed")
        assert _content(run)["imagegen"]["machine"]["precision"] == precision


# One step


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.usefixtures("searching")
def test_steps_are_those_of_a_literal_computation(
    precision: str, optimizer: str, algorithm: str
) -> None:
    """Clipped gradients, and the steps that a scaler leaves out."""
    quiet_lightning()
    factory = instantiate(compose("train", [f"optimizer={optimizer}"]).optimizer)
    batches = [
        {"images": torch.from_numpy(Digits().split("train").images[i::200])} for i in range(9)
    ]
    model = tiny_model(Digits().spec).train()
    module = ImageModule(copy.deepcopy(model), factory)
    options, _ = training_precision({"accelerator": "cpu", "devices": 1, "precision": precision})
    trainer = Trainer(
        **options,
        max_epochs=1,
        limit_val_batches=0,
        gradient_clip_val=CLIP,
        gradient_clip_algorithm=algorithm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, loader)

    literal = build_optimizer(factory, model)
    scaled = precision == "16-mixed"
    scale, left_out, in_a_row = (2.0**24 if scaled else 1.0), 0, 0
    for batch in batches:
        model.zero_grad()
        with _autocast(precision):
            loss = model.bits_per_dim(batch["images"]).mean()
        (scale * loss).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient /= scale
        # Of the norms, as PyTorch does it: in few digits, a last bit soon becomes a large one.
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        if not norm.isfinite():
            assert scaled
            scale, left_out, in_a_row = scale / 2, left_out + 1, 0
            continue
        assert norm > CLIP
        for gradient in gradients:
            if algorithm == "norm":
                gradient *= CLIP / (norm + 1e-6)
            else:
                gradient.clamp_(-CLIP, CLIP)
        literal.step()
        in_a_row += 1
        if scaled and in_a_row == 2:
            scale, in_a_row = scale * 2, 0
    assert (left_out > 1) == scaled
    assert left_out < 7
    assert trainer.global_step == len(batches)
    if scaled:
        assert trainer.precision_plugin.scaler.get_scale() == scale  # type: ignore[attr-defined]
    for name, value in module.model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])


def _autocast(precision: str) -> torch.autocast:
    """As Lightning computes in this precision."""
    low = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    return torch.autocast("cpu", low, enabled=low is not None, cache_enabled=False)


@pytest.mark.parametrize(
    ("precision", "head"),
    [
        ("bf16-mixed", "mixture_of_logistics"),
        ("bf16-mixed", "categorical"),
        ("16-mixed", "mixture_of_logistics"),
    ],
)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_mechanisms_learn_in_half_the_digits(attention: str, head: str, precision: str) -> None:
    """Loss and gradients are nearly those of float32."""
    cfg = compose("train", [*TINY[:4], f"attention={attention}", f"head={head}"])
    torch.manual_seed(0)
    sections = {name: plain(cfg[name]) for name in ("model", "attention", "head")}
    model = ImageTransformer.from_options(Digits().spec, **model_options(sections, Digits()))
    images = torch.from_numpy(Digits().split("train").images[:8])
    scale = 2.0**10 if precision == "16-mixed" else 1.0

    def step(precision: str, scale: float) -> tuple[float, Tensor]:
        model.zero_grad()
        with _autocast(precision):
            loss = model.bits_per_dim(images).mean()
        assert loss.dtype == torch.float32
        (scale * loss).backward()
        # A parameter that none of the losses reaches has no gradient in either.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        return loss.item(), torch.cat([gradient.flatten() for gradient in gradients]) / scale

    expected, exact = step("32-true", 1.0)
    loss, gradient = step(precision, scale)
    assert loss == pytest.approx(expected, rel=0.01)
    assert gradient.isfinite().all()
    assert torch.nn.functional.cosine_similarity(gradient, exact, dim=0) > 0.99
    assert gradient.norm().item() == pytest.approx(exact.norm().item(), rel=0.05)


# Beside everything else


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.usefixtures("searching")
def test_beside_the_other_options(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulated gradients, averaged weights, steps left out, watchers, labels, determinism."""
    options = [
        *TINY,
        f"trainer.precision={precision}",
        "trainer.accumulate_grad_batches=2",
        "trainer.limit_train_batches=16",
        "trainer.deterministic=true",
        "callbacks=debug",
        "callbacks.grids=null",
        "callbacks.ema.decay=0.9",
        "on_nan=skip",
        "model.conditional=true",
        "model.flips=true",
        "model.dropout=0.1",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    stop = "+callbacks.stop._target_=tests.training.test_arithmetic.Stop"
    monkeypatch.setattr(Stop, "armed", True)
    monkeypatch.setattr(Stop, "step", 11)
    try:
        assert run_train(monkeypatch, *options, f"hydra.run.dir={whole}") == 0
        assert run_train(monkeypatch, *options, stop, f"hydra.run.dir={parts}") == 130
        assert run_train(monkeypatch, stop, f"resume={parts}") == 0
    finally:
        torch.use_deterministic_algorithms(False)
    expected, found = _content(whole), _content(parts)
    for key in ("state_dict", "current_model_state", "optimizer_states", "global_step"):
        _assert_same(found[key], expected[key], key)
    assert expected["global_step"] == 16
    for name in ("train/bits_per_dim", "val/bits_per_dim", METRIC):
        assert _column(parts, name) == _column(whole, name)
        assert np.isfinite(_column(whole, name)).all()
    assert min(_column(whole, METRIC)) > 0
    assert not _column(whole, "train/skipped_steps")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_rate_is_found(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = compose("train", [*TINY[:6], f"trainer.precision={precision}"])
    rows, suggested = find_lr.find(cfg)
    assert len(rows) > 0.8 * (find_lr.STEPS - find_lr.SKIPPED)
    assert 4e-4 < suggested["lr"] < 0.2
    # The loss falls from where a new model is.
    assert min(loss for _, loss in rows) < rows[0][1] - 0.2
