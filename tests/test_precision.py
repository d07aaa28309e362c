"""In which arithmetic trainings run, and that little is lost under bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from imagegen import precision
from imagegen.cli import compose
from imagegen.find_lr import _relevant
from imagegen.heads.base import OutputHead
from imagegen.heads.categorical import Categorical
from imagegen.heads.mixture_of_logistics import MixtureOfLogistics
from imagegen.options import plain
from imagegen.precision import has_bf16, trainer_options
from imagegen.run import _trainer

# `has_bf16` by this name is the real one: conftest replaces that of the module.
FLAGS = "flags\t\t: fpu avx2 {}\n"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kinds of device that were asked for bfloat16, all of which have it."""
    kinds: list[str] = []

    def has(device: torch.device) -> bool:
        kinds.append(device.type)
        return True

    monkeypatch.setattr(precision, "has_bf16", has)
    return kinds


def _options(**options: Any) -> dict[str, Any]:
    return {"precision": "auto", "accelerator": "auto", **options}


def test_auto_is_bf16_where_there_are_instructions(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert trainer_options(_options())["precision"] == "bf16-mixed"
    assert trainer_options(_options(accelerator="cpu"))["precision"] == "bf16-mixed"
    assert asked == ["cpu", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    trainer_options(_options())
    trainer_options(_options(accelerator="gpu"))
    trainer_options(_options(accelerator="cpu"))
    trainer_options(_options(accelerator="mps"))
    assert asked[2:] == ["cuda", "cuda", "cpu", "mps"]


def test_other_precisions_stay(asked: list[str]) -> None:
    for given in ("32-true", "16-mixed", None):
        assert trainer_options(_options(precision=given))["precision"] == given
    assert not asked


def test_trainings_and_the_rate_finder_take_it(asked: list[str], tmp_path: Path) -> None:
    cfg = compose("train", ["trainer=cpu", "callbacks=default"])
    cfg.callbacks = {}
    assert _trainer(cfg, tmp_path, []).precision == "bf16-mixed"
    assert _relevant(plain(cfg)["trainer"])["precision"] == "bf16-mixed"
    for preset in ("mnist_paper", "cifar10_paper"):
        assert compose("train", [f"experiment={preset}"]).trainer.precision == "32-true"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (FLAGS.format("sse2"), False),
        (FLAGS.format("avx512_bf16"), True),
        ("Features\t: fp asimd bf16\n", True),
        (FLAGS.format("avx512_bf16x"), False),
    ],
)
def test_processors_are_asked(text: str, answer: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "Path", lambda _: tmp_path / "cpuinfo")
        assert has_bf16(torch.device("cpu")) is answer
        assert has_bf16(torch.device("meta")) is False


@pytest.mark.parametrize("kind", [Categorical, MixtureOfLogistics])
def test_heads_keep_float32_under_autocast(kind: type[OutputHead]) -> None:
    torch.manual_seed(0)
    head = kind(16, 256)
    hidden = torch.randn(7, 16)
    expected = head(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head(hidden), expected)
        assert head(hidden.bfloat16()).dtype == torch.float32
