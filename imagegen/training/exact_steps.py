"""Makes a resumed run take the very steps that it would have taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from imagegen.training.lightning_fixes import count_rows, gradients_wait, restore_loaders

GRADIENTS = "waiting_gradients"
"""Where a checkpoint keeps the gradients of a step whose batches were not all seen."""


class ExactSteps(Callback):
    """Makes a resumed run take the very steps that it would have taken.

    The random numbers of a step (dropout) depend on the seed, the step and the process only, so
    that they need no state; and metrics are logged under the number of optimizer steps done.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._gradients: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the data order continue where the checkpoint left it."""
        restore_loaders(trainer)
        for name, parameter in pl_module.named_parameters():
            if name in self._gradients:
                parameter.grad = self._gradients[name].to(parameter.device)
        self._gradients = {}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the gradients that wait for further batches where a validation came between.

        Not those of several processes, each of which has its own.
        """
        if trainer.world_size == 1 and gradients_wait(trainer):
            checkpoint[GRADIENTS] = {
                name: parameter.grad.detach().cpu()
                for name, parameter in pl_module.named_parameters()
                if parameter.grad is not None
            }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take them up again."""
        self._gradients = checkpoint.get(GRADIENTS, {})

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed torch for this step, and count it rightly."""
        count_rows(trainer)
        place = [self.seed, trainer.global_step, batch_idx, trainer.global_rank]
        torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0]))
