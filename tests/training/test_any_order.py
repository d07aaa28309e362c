"""Training models of any order: random regions, their loss, and resuming bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.core.spec import ImageSpec
from imagegen.training.module import ImageModule
from tests.helpers import DRAWING, Interrupt, read_rows, read_weights, run_train, tiny_model

ANY = [
    *DRAWING,
    "model.order=any",
    "model.orders=8",
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
    model = load_checkpoint(whole).model
    assert (model.order, model.orders) == ("any", 8)


@pytest.mark.parametrize(("whole_images", "weight"), [(0.0, 0.0), (0.0, 0.5), (1.0, 0.0)])
def test_the_loss_is_the_mean_over_values(
    whole_images: float, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ImageSpec(6, 5, 3)
    embedding = {"_target_": "imagegen.model.embeddings.Neighbourhood"}
    options = {"whole_images": whole_images, "visible_weight": weight}
    model = tiny_model(spec, embedding=embedding, order="any", **options)
    module: Any = ImageModule(model, torch.optim.SGD)
    module.trainer = SimpleNamespace(world_size=1, progress_bar_callback=None)
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    given: list[torch.Tensor] = []
    score = model.log_prob

    def spied(*args: Any) -> torch.Tensor:
        given.append(args[3])
        return score(*args)

    monkeypatch.setattr(model, "log_prob", spied)
    images = torch.randint(0, 256, (8, *spec.shape), dtype=torch.uint8)
    torch.manual_seed(1)
    loss = module.training_step({"images": images}, 0)
    (visible,) = given
    assert visible.flatten(1).any(dim=1).any() == (whole_images == 0)
    total = count = 0.0
    for row, kept in zip(score(images, visible=visible), visible.sum(dim=(1, 2)), strict=True):
        of_visible, of_missing = row.flatten().double().split([3 * int(kept), 90 - 3 * int(kept)])
        total -= (weight * of_visible.sum() + of_missing.sum()).item() / math.log(2)
        count += weight * len(of_visible) + len(of_missing)
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
    if weight == 0:
        bits = model.bits_per_dim(images, visible=visible)
        missing = (~visible).sum(dim=(1, 2))
        assert loss.item() == pytest.approx(((bits * missing).sum() / missing.sum()).item())
