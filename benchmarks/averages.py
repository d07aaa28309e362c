r"""What averaging the weights is worth: one training, scored with several averages at its end.

    PYTHONPATH=. python train.py logger=none callbacks.grids=null \
        +callbacks.averages._target_=benchmarks.averages.Averages callbacks.ema.decay=null

prints bits/dim of the validation and the test images for the weights as they were trained and for
each average, which all saw the same steps. Results: benchmarks/results/averaging.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from imagegen.evaluation.scores import score_images, standard_error
from imagegen.training.averaging import _Average
from imagegen.training.module import ImageModule


class Averages(Callback):
    """Keeps an average for each decay beside the training.

    Args:
        decays: see `imagegen.training.averaging.WeightAverage`.
        at: steps after which everything is scored, beside the end.
        images: of each split that are scored; None for all.
    """

    def __init__(
        self,
        decays: Sequence[float] = (0.9, 0.98, 0.99, 0.995, 0.998, 0.999),
        at: Sequence[int] = (),
        images: int | None = None,
    ) -> None:
        self.decays, self.at, self.images = list(decays), set(at), images
        self.averages: dict[float, _Average] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the averages."""
        device = trainer.strategy.root_device
        self.averages = {decay: _Average(pl_module, device, decay) for decay in self.decays}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the averages."""
        for average in self.averages.values():
            average.update_parameters(pl_module)
        if trainer.global_step in self.at:
            self._score(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score."""
        if trainer.global_step not in self.at:
            self._score(trainer, pl_module)

    def _score(self, trainer: Trainer, pl_module: LightningModule) -> None:
        modules = {"none": pl_module}
        modules |= {str(decay): each.module for decay, each in self.averages.items()}
        for name, module in modules.items():
            assert isinstance(module, ImageModule)
            row: dict[str, Any] = {"step": trainer.global_step, "decay": name}
            for split in ("val", "test"):
                images = trainer.datamodule.split(split).images[: self.images]  # type: ignore[attr-defined]
                with torch.autocast("cpu", enabled=False):
                    scores = score_images(module.model, images)
                row[split] = round(float(scores.mean()), 5)
                row[f"{split}_error"] = standard_error(scores)
            print(json.dumps(row), flush=True)
