"""Training models of any order: random regions, their loss, and resuming bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.core.spec import ImageSpec
from imagegen.training.module import ImageModule
from tests.helpers import SMALL, Interrupt, read_rows, read_weights, run_train, tiny_model

ANY = [
    *SMALL,
    "model.order=any",
    "logger=csv",
    "callbacks.grids.every=2",
    "trainer.log_every_n_steps=1",
]
STOP = "+callbacks.stop._target_=tests.helpers.Interrupt"


def test_a_resumed_run_takes_the_very_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_train(monkeypatch, *ANY, STOP, f"hydra.run.dir={whole}") == 0
    Interrupt.armed = True
    run_train(monkeypatch, *ANY, STOP, f"hydra.run.dir={parts}")
    assert run_train(monkeypatch, STOP, f"resume={parts}") == 0
    expected, found = read_weights(whole), read_weights(parts)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name

    def of(folder: Path, name: str) -> list[str]:
        return [row[name] for row in read_rows(folder) if row.get(name)]

    for name in ("train/bits_per_dim", "val/bits_per_dim", "val/bits_per_hidden_value"):
        assert of(whole, name) == of(parts, name) != []
    assert load_checkpoint(whole).model.order == "any"


class _Trainer:
    world_size = 1
    progress_bar_callback = None


@pytest.mark.parametrize("whole_images", [0.0, 1.0])
def test_the_loss_is_the_mean_over_hidden_values(
    whole_images: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ImageSpec(6, 5, 1, 17)
    embedding = {"_target_": "imagegen.model.embeddings.Neighbourhood"}
    model = tiny_model(spec, embedding=embedding, order="any", whole_images=whole_images)
    module: Any = ImageModule(model, optimizer=lambda parameters: None)
    module._trainer = _Trainer()
    monkeypatch.setattr(ImageModule, "log", lambda *args, **options: None)
    given: list[torch.Tensor] = []
    score = model.bits_per_dim

    def spied(*args: Any) -> torch.Tensor:
        given.append(args[3])
        return score(*args)

    monkeypatch.setattr(model, "bits_per_dim", spied)
    images = torch.randint(0, 17, (8, *spec.shape), dtype=torch.uint8)
    torch.manual_seed(1)
    loss = module.training_step({"images": images}, 0)
    (visible,) = given
    assert visible.flatten(1).any(dim=1).any() == (whole_images == 0)
    log_prob = model.log_prob(images, visible=visible)
    total = count = 0.0
    for row, kept in zip(log_prob, visible.flatten(1).sum(dim=1), strict=True):
        total -= row[kept:].double().sum().item() / torch.log(torch.tensor(2.0)).item()
        count += len(row) - int(kept)
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
