"""An exponential moving average of the weights, which is what is evaluated and drawn from."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from imagegen.core.errors import UserError
from imagegen.training.lightning_fixes import OwnAverage


class _Average(AveragedModel):
    """The exponential moving average of `WeightAverage`, on the device of the training.

    The count of updates stays on the CPU. PyTorch's own update has it on the device and reads it
    back several times in each step.

    Args:
        model: the weights to begin with.
        device: of the training; the model may not be there yet.
        decay: see `WeightAverage`.
    """

    def __init__(self, model: nn.Module, device: torch.device, decay: float) -> None:
        super().__init__(model)
        self.module.to(device)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move towards the weights of a model; its buffers are copied."""
        averaged: list[Tensor] = [*self.module.parameters()]
        current: list[Tensor] = [*model.parameters()]
        t = int(self.n_averaged)
        if t:
            torch._foreach_lerp_(averaged, current, 1 - min(self.decay, (1 + t) / (10 + t)))
        else:
            torch._foreach_copy_(averaged, current)
        for own, other in zip(self.module.buffers(), model.buffers(), strict=True):
            own.copy_(other)
        self.n_averaged += 1


class WeightAverage(OwnAverage):
    """Lightning's weight averaging as an exponential moving average with a warm-up.

    After update t the average is d average + (1 - d) weights, with d = min(decay, (1 + t) / (10 +
    t)), so that short trainings forget their beginning as well. Validation, samples and the
    `state_dict` of checkpoints are those of the average; the weights that are trained are beside it
    in the checkpoint, for resuming.

    Args:
        decay: 0 to below 1.

    Raises:
        UserError: for another decay.
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"callbacks.ema.decay={decay} must be at least 0 and below 1, or null.")
        super().__init__()
        self.decay = decay
        self._shows_average = False

    def make(self, trainer: Trainer, pl_module: LightningModule) -> _Average:
        return _Average(pl_module, trainer.strategy.root_device, self.decay)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_epoch_start(trainer, pl_module)
        self._shows_average = self.averages

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_epoch_end(trainer, pl_module)
        self._shows_average = False

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Put the trained weights back, before a checkpoint is written of what they are now."""
        if self._shows_average:
            self.on_validation_epoch_end(trainer, pl_module)


def weight_average(decay: float | None, **options: Any) -> Callback:
    """`WeightAverage`, or a callback that does nothing without a decay."""
    return Callback() if decay is None else WeightAverage(decay, **options)
