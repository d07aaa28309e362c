"""The example mechanism of CONTRIBUTING.md does what is said there, exactly as printed there."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

import imagegen.attention
from imagegen.attention.base import CausalAttention
from imagegen.attention.hybrid import HybridAttention
from imagegen.cli import entry as cli
from imagegen.core.build import build
from tests.attention.contract import Contract, assert_all_close, gradients, inputs
from tests.helpers import SMALL, read_images, read_rows, run_train, sample

ROOT = Path(__file__).parents[1]
NAME = "min_gru"


@pytest.fixture(scope="module")
def blocks() -> dict[str, str]:
    """The example's two files, by language."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return {
        found[1]: found[2] for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)
    }


@pytest.fixture(scope="module", autouse=True)
def placed(blocks: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The two files where they count as the project's own, which itself stays as it is.

    Once for all tests: a class that was imported twice would be two classes to the type checker.
    """
    project, package = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "conf", project / "conf")
    (project / "conf" / "attention" / f"{NAME}.yaml").write_text(blocks["yaml"])
    (package / f"{NAME}.py").write_text(blocks["python"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "PROJECT_ROOT", project)
        path = [*imagegen.attention.__path__, str(package)]
        patch.setattr(imagegen.attention, "__path__", path)
        importlib.invalidate_caches()
        yield
    sys.modules.pop(f"imagegen.attention.{NAME}", None)
    vars(imagegen.attention).pop(NAME, None)


@pytest.fixture
def attention(blocks: dict[str, str]) -> CausalAttention:
    torch.manual_seed(0)
    options = yaml.safe_load(blocks["yaml"])
    return build(options, CausalAttention, d_model=12, n_heads=2, row_length=28, layer=0).double()


def _reference(module: CausalAttention, x: Tensor) -> Tensor:
    """The equations, literally."""
    images = []
    for sequence in x:
        h, rows = torch.zeros(12, dtype=x.dtype), []
        for position in sequence:
            projected = module.gate_and_candidate.weight @ position + module.gate_and_candidate.bias
            z = 1 / (1 + (-projected[:12]).exp())
            h = (1 - z) * h + z * projected[12:]
            rows.append(module.out.weight @ h + module.out.bias)
        images.append(torch.stack(rows))
    return torch.stack(images)


def test_it_is_short(blocks: dict[str, str]) -> None:
    lines = blocks["python"].splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_it_is_what_its_equations_say(attention: CausalAttention, length: int) -> None:
    x = inputs(length).requires_grad_()
    y, expected = attention(x)[0], _reference(attention, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    assert_all_close(gradients(attention, x, y), gradients(attention, x, expected))


class TestContract(Contract):
    """It keeps that of all mechanisms."""


def test_it_trains_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    options = [f"attention={NAME}", "trainer.max_epochs=5", "optimizer.lr=0.01"]
    assert run_train(monkeypatch, *SMALL, *options, f"hydra.run.dir={run}") == 0
    scores = [float(row["val/bits_per_dim"]) for row in read_rows(run) if row["val/bits_per_dim"]]
    assert scores[-1] < scores[0] < 4.2
    images = read_images(sample(run, tmp_path / "samples", "n=3"))
    assert len(images) == 3
    assert all(image.shape[:2] == (8, 8) for image in images.values())


def test_hybrids_take_it_by_name() -> None:
    hybrid = HybridAttention(12, 2, pattern=[NAME, "softmax"])
    assert type(hybrid.mechanism).__name__ == "MinGRU"


def test_help_lists_it(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_train(monkeypatch, "--help") == 0
    assert re.search(rf"^\s*attention: .*\b{NAME}\b", capfd.readouterr().out, re.M)
