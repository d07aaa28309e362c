"""The benchmark of training steps: what it measures, writes and refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from imagegen.cli.entry import compose
from imagegen.commands.benchmark.contestants import TRAINERS
from imagegen.commands.benchmark.setting import Setting
from imagegen.commands.benchmark.train import markdown, run
from imagegen.commands.benchmark.training_step import ModelStep
from imagegen.core import machine
from imagegen.core.errors import UserError
from imagegen.core.values import plain
from imagegen.model.transformer import ImageTransformer
from tests.helpers import tree

SIZES = ["n_layers=1", "d_model=16", "n_heads=2", "head_dim=8", "d_ff=16"]
SMALL = [*(f"model.{size}" for size in SIZES), "repeats=2", "threads=1", "device=cpu"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The command's folder, and what it returned; bfloat16 is not there."""
    out = tmp_path_factory.mktemp("train") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(machine.FORCE_BF16, "0")
        options = ["contestants=[linear,linear_bf16]", "batch_sizes=[1,2]", f"out={out}"]
        yield out, run(compose("benchmark_train", [*SMALL, *options]))


def test_command_writes_what_it_measured(done: tuple[Path, dict[str, Any]]) -> None:
    out, returned = done
    assert {path.name for path in out.iterdir()} == {"train.json", "train.md"}
    result = json.loads((out / "train.json").read_text())
    assert result == json.loads(json.dumps(returned))
    assert result["length"] == 784
    assert result["optimizer"]["_target_"] == "torch.optim.RAdam"
    linear, bf16 = result["contestants"]
    assert (linear["name"], bf16["name"]) == ("linear", "linear_bf16")
    for batch in linear["batches"]:
        seconds = [repeat["seconds"] for repeat in batch["repeats"]]
        assert len(seconds) == 2
        assert batch["seconds_a_step"]["least"] == min(seconds) > 0
        assert batch["images_per_second"]["most"] == batch["batch_size"] / min(seconds)
        assert isinstance(batch["peak_bytes"], int)
    for batch in bf16["batches"]:
        assert batch["seconds_a_step"] is None
        assert "no instructions for bfloat16" in batch["not_measured"]
    table = (out / "train.md").read_text()
    assert table == markdown(result)
    assert "- linear, bf16-mixed at 2: skipped, because this processor has no instructions" in table
    assert "gradients clipped to a norm of 1, RAdam" in table


def test_ratios_are_against_the_first_row(done: tuple[Path, dict[str, Any]]) -> None:
    result = json.loads((done[0] / "train.json").read_text())
    linear = result["contestants"][0]
    for batch in linear["batches"]:
        batch["seconds_a_step"] = {"median": 1.0, "least": 0.9, "most": 1.2}
    slow = json.loads(json.dumps(linear))
    slow["title"] = "slow"
    for batch in slow["batches"]:
        batch["seconds_a_step"] = {k: 3 * v for k, v in batch["seconds_a_step"].items()}
    result["contestants"] = [linear, slow]
    row = next(line for line in markdown(result).splitlines() if line.startswith("| slow | ×"))
    assert row == "| slow | ×3.00 (2.25 – 4.00) | ×3.00 (2.25 – 4.00) |"


@pytest.mark.parametrize("name", ["linear", "linear_bf16", "softmax"])
def test_a_step_trains_as_its_contestant_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = plain(compose("benchmark_train", SMALL))
    full = Setting.from_config(config, 0)
    spec = {"height": 4, "width": 4, "channels": 1, "levels": 256}
    setting = Setting(spec, {**full.model, "dropout": 0.0}, 0)
    seen = []
    original = ImageTransformer.bits_per_dim

    def bits_per_dim(self: ImageTransformer, images: torch.Tensor) -> torch.Tensor:
        weights = self.blocks[0].feed_forward[0].weight
        seen.append((len(images), torch.is_autocast_enabled("cpu"), weights.clone(), self.training))
        return original(self, images)

    monkeypatch.setattr(ImageTransformer, "bits_per_dim", bits_per_dim)
    optimizer = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 1.0}
    go = ModelStep(TRAINERS[name], setting, optimizer, 3, threads=1, device="cpu").prepare()
    go()
    assert [size for size, *_ in seen] == [1, 3]
    assert all(autocast == (name == "linear_bf16") for _, autocast, _, _ in seen)
    assert all(training for *_, training in seen)
    moved = (seen[0][2] - seen[1][2]).norm()
    assert 0 < moved <= 1.0001  # the learning rate times the clipped gradient


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["contestants=[linear_bf61]"], r"did you mean linear_bf16\?"),
        (["batch_sizes=[0]"], "batch_sizes=0, but"),
        (["repeats=0"], "repeats=0, but"),
        (["model.n_layers=0"], "model.n_layers=0 must be at least 1"),
        (["optimizer.lr=-1"], "optimizer is refused: Invalid learning rate: -1"),
    ],
)
def test_refusals_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        run(compose("benchmark_train", [*SMALL, "out=out", *overrides]))
    assert tree(tmp_path) == set()
