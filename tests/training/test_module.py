"""The training module: what a step is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from imagegen.core.spec import ImageSpec
from imagegen.training.module import ImageModule
from tests.helpers import tiny_model


@pytest.mark.parametrize("flips", [False, True])
def test_half_of_the_images_are_mirrored_and_the_model_is_told(
    flips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(ImageSpec(4, 6, 3), flips=flips)
    module = ImageModule(model, torch.optim.SGD)
    module.trainer = SimpleNamespace(world_size=1, progress_bar_callback=None)  # type: ignore[assignment]
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    seen: dict[str, Any] = {}

    def keep(images: torch.Tensor, labels: Any, flipped: torch.Tensor | None) -> torch.Tensor:
        seen.update(images=images, flipped=flipped)
        return torch.zeros(len(images))

    monkeypatch.setattr(model, "bits_per_dim", keep)
    torch.manual_seed(0)
    images = torch.randint(256, (200, 4, 6, 3), dtype=torch.uint8)
    module.training_step({"images": images}, 0)
    if not flips:
        assert seen["flipped"] is None
        assert torch.equal(seen["images"], images)
        return
    flipped = seen["flipped"]
    assert 70 < int(flipped.sum()) < 130
    # Columns in the other order; rows and channels as they were.
    assert torch.equal(seen["images"][flipped], images[flipped][:, :, [5, 4, 3, 2, 1, 0]])
    assert torch.equal(seen["images"][~flipped], images[~flipped])
