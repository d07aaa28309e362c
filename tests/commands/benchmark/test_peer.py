"""The benchmark against the authors' library: its ratios, its model, its refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from imagegen.cli.entry import compose
from imagegen.commands.benchmark import generate, peer
from imagegen.commands.benchmark.common import spread
from imagegen.commands.benchmark.contestants import DRAWERS, TRAINERS
from imagegen.commands.benchmark.generation_step import GenerationStep
from imagegen.commands.benchmark.peer import markdown, ratios, run
from imagegen.commands.benchmark.peer_library import PeerGenerator, PeerTrainer
from imagegen.commands.benchmark.setting import Setting
from imagegen.commands.benchmark.training_step import ModelStep
from imagegen.core.errors import UserError
from imagegen.core.values import plain
from tests.helpers import tree
from tests.peers import peer as library

SIZES = ["n_layers=1", "d_model=16", "n_heads=2", "head_dim=8", "d_ff=16"]
SMALL = [*(f"model.{size}" for size in SIZES), "repeats=1", "threads=1", "device=cpu"]


def _drawn(name: str, rates: dict[int, float]) -> dict[str, Any]:
    batches = [
        {
            "batch_size": size,
            "images_per_second": spread([rate]),
            "seconds_for_batch": spread([size / rate]),
            "not_measured": None,
        }
        for size, rate in rates.items()
    ]
    best = max(rates, key=lambda size: rates[size])
    return {"name": name, "title": name, "best_batch_size": best, "batches": batches}


def _trained(name: str, seconds: float | None, peak: int | None) -> dict[str, Any]:
    reason = None if seconds else "skipped, because of a reason"
    each = {"seconds_a_step": seconds and spread([seconds]), "peak_bytes": peak}
    batches = [{"batch_size": 4, **each, "not_measured": reason}]
    return {"name": name, "title": name, "batches": batches}


def _results() -> tuple[dict[str, Any], dict[str, Any]]:
    drawn = {
        "sentence": "a model",
        "costs": {"length": 784},
        "machine": {"gpu": None, "processor": "abacus"},
        "threads": 2,
        "torch_version": "2",
        "imagegen_version": "0",
        "contestants": [
            _drawn("linear", {1: 4.0, 16: 40.0}),
            _drawn("peer_linear", {1: 0.25, 16: 5.0}),
        ],
    }
    trained = {
        "plan": {"lengths": [4]},
        "contestants": [
            _trained("linear", 1.0, 2**20),
            _trained("linear_bf16", None, None),
            _trained("peer_linear", 1.5, 2**21),
        ],
    }
    return drawn, trained


def test_ratios_say_how_many_times_faster_or_smaller_ours_is() -> None:
    drawn, trained = _results()
    found = ratios(drawn, trained)
    assert [row["ratio"] and row["ratio"]["median"] for row in found] == [8.0, 16.0, None, 1.5, 2.0]
    assert found[0]["what"] == "images/s, best batch against best batch (16 against 16)"
    table = markdown({"ratios": found, "generate": drawn, "train": trained})
    assert "| seconds per image, batch 1 | 0.250 | 4.00 | ×16.0 |\n" in table
    assert "- linear_bf16 at 4: skipped, because of a reason." in table


def test_without_the_library_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(peer, "is_installed", lambda: False)
    with pytest.raises(UserError, match=r"is not installed; CONTRIBUTING.md tells under Peers how"):
        run(compose("benchmark_peer", [*SMALL, "out=out"]))
    assert tree(tmp_path) == set()


def _setting(**options: Any) -> Setting:
    library("fast_transformers.builders", "pytorch-fast-transformers")
    full = Setting.from_config(plain(compose("benchmark_peer", SMALL)), 0)
    spec = {"height": 4, "width": 4, "channels": 3, "levels": 256}
    return Setting(spec, {**full.model, "dropout": 0.0, "n_layers": 2, **options}, 0)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("tokens", ["pixel", "subpixel"])
def test_its_generator_steps_through_what_its_trainer_sees(attention: str, tokens: str) -> None:
    setting = _setting(tokens=tokens)
    trainer = PeerTrainer(setting, attention, "cpu").eval()
    generator = PeerGenerator(setting, attention).eval()
    generator.load_state_dict(trainer.state_dict())
    images = torch.randint(0, 256, (2, 4, 4, 3), dtype=torch.uint8)
    sequence = trainer.raster.to_sequence(images).long()
    seen: list[torch.Tensor] = []
    with torch.inference_mode():
        loss = trainer.loss(images)
        generator.sampled = lambda p: seen.append(p) or values  # type: ignore[method-assign, func-returns-value]
        state: Any = None
        values = torch.full_like(sequence[:, 0], -1)
        for position in range(sequence.shape[1]):
            _, state = generator.step(values, position, state)
            values = sequence[:, position]
        parameters = torch.stack(seen, dim=1)
        expected = -generator.head.log_prob(parameters, sequence).mean()
        filled = generator.filled_state(2, sequence.shape[1])
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert [[t.shape for t in layer] for layer in filled] == [
        [t.shape for t in layer] for layer in state
    ]


def test_its_draws_follow_the_mixture() -> None:
    generator = PeerGenerator(_setting(), "linear")
    parameters = torch.zeros(1, 30).repeat(1000, 1)
    parameters[:, 0] = 50.0  # the first component, which is at 0.5 and narrow
    parameters[:, 10] = 0.5
    parameters[:, 20:] = -6.0
    levels = generator.sampled(parameters)
    assert levels.shape == (1000, 1)
    assert abs(levels.float().mean().item() - 1.5 * 127.5) < 0.5
    parameters[:, 20:] = 5.0
    levels = generator.sampled(parameters)
    assert (levels.min().item(), levels.max().item()) == (0, 255)


@pytest.mark.parametrize("name", ["peer_linear", "peer_softmax"])
def test_its_contestants_run(name: str) -> None:
    setting = _setting()
    draw = GenerationStep(DRAWERS[name], setting, 2, (0, 40), 2, 1.0, threads=1, device="cpu")
    assert all(seconds > 0 for seconds in draw.prepare()())
    optimizer = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1}
    ModelStep(TRAINERS[name], setting, optimizer, 2, threads=1, device="cpu").prepare()()


def test_sizes_that_it_has_not_are_refused() -> None:
    with pytest.raises(UserError, match="d_model of n_heads times head_dim"):
        PeerGenerator(_setting(head_dim=4), "linear")


def test_command_prints_the_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library("fast_transformers.builders", "pytorch-fast-transformers")
    monkeypatch.setattr(generate, "MATRIX", 64)
    monkeypatch.setattr(generate, "COPIED", 2**16)
    sizes = ["batch_sizes=[2]", "train_batch_sizes=[1]", "steps=3", f"out={tmp_path / 'out'}"]
    result = run(compose("benchmark_peer", [*SMALL, *sizes]))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"peer.json", "peer.md"}
    assert json.loads(json.dumps(result)) == json.loads(
        (tmp_path / "out" / "peer.json").read_text()
    )
    assert result["generate"]["plan"]["lengths"] == [1, 2]
    ratios_found = {row["what"]: row["ratio"] for row in result["ratios"]}
    assert ratios_found["seconds per image, batch 1"]["median"] > 0
    assert "| seconds a training step, batch 1, float32 |" in capsys.readouterr().out
