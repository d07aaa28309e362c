"""The training module: what a step is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from imagegen.core.spec import ImageSpec
from imagegen.training.module import ImageModule
from tests.helpers import tiny_model
from tests.model.helpers import by_hand


@pytest.mark.parametrize(
    ("options", "orders"), [({}, 1), ({"flips": True}, 2), ({"orders": 4}, 4), ({"orders": 8}, 8)]
)
def test_images_are_turned_equally_often_and_the_model_is_told(
    options: dict[str, Any], orders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(ImageSpec(4, 4 if orders == 8 else 6, 3), **options)
    module = ImageModule(model, torch.optim.SGD)
    module.trainer = SimpleNamespace(world_size=1, progress_bar_callback=None)  # type: ignore[assignment]
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    seen: dict[str, Any] = {}

    def keep(images: torch.Tensor, labels: Any, orientation: Any) -> torch.Tensor:
        seen.update(images=images, orientation=orientation)
        return torch.zeros(len(images))

    monkeypatch.setattr(model, "bits_per_dim", keep)
    torch.manual_seed(0)
    images = torch.randint(256, (2000, *model.spec.shape), dtype=torch.uint8)
    random = torch.random.get_rng_state()
    module.training_step({"images": images}, 0)
    if orders == 1:
        assert seen["orientation"] is None
        assert torch.equal(seen["images"], images)
        return
    orientation = seen["orientation"]
    counts = orientation.bincount()
    assert len(counts) == orders
    assert (abs(counts - 2000 / orders) < 4 * (2000 / orders) ** 0.5).all()
    for each in range(orders):
        own = orientation == each
        assert torch.equal(seen["images"][own], by_hand(images[own], each))
    if orders == 2:
        # As runs of before, which may be resumed.
        torch.random.set_rng_state(random)
        assert torch.equal(orientation == 1, torch.rand(2000) < 0.5)
