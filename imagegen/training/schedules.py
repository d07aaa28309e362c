"""Learning-rate schedules that follow steps or the time budget, whichever is spent sooner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Timer

from imagegen.core.errors import UserError


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then a cosine down to a floor (Loshchilov and Hutter, 2017, eq. 5).

    Attributes:
        warmup: share of the training, 0 to 1, in which the learning rate rises from 0.
        floor: the factor on the learning rate at the end, 0 to 1.

    Raises:
        UserError: for shares outside 0 to 1.
    """

    warmup: float = 0.05
    floor: float = 0.02

    def __post_init__(self) -> None:
        for name in ("warmup", "floor"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise UserError(f"scheduler.{name}={value} must be between 0 and 1.")

    def factor(self, progress: float) -> float:
        """The factor on the learning rate when `progress` of the training, 0 to 1, is done."""
        if progress < self.warmup:
            return progress / self.warmup
        share = (progress - self.warmup) / max(1e-9, 1 - self.warmup)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


@dataclass(frozen=True)
class Constant:
    """The learning rate as it is."""

    def factor(self, progress: float) -> float:
        """Always 1."""
        return 1.0


class TrainingProgress:
    """The share of a training that is done, 0 to 1, as a function of the optimizer steps done.

    It looks at the limits in steps, epochs and time, and takes the one spent sooner.

    Args:
        trainer: with its limits and data.

    Attributes:
        endless: whether training has no limit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
        self._timers = [timer for timer in timers if timer.time_remaining() is not None]
        self._steps, self._epochs = max(0, trainer.max_steps), max(0, trainer.max_epochs or 0)
        self._epoch_steps = 0
        if self._epochs:
            trainer.estimated_stepping_batches  # noqa: B018  # reading it loads the data
            batches = trainer.num_training_batches
            if math.isfinite(batches):
                self._epoch_steps = math.ceil(batches / trainer.accumulate_grad_batches)
        # Steps of the present kind that the epochs done amount to, minus the steps done: another
        # batch size, or other data, make epochs of another number of steps.
        self._ahead = 0.0
        unlimited = trainer.max_steps < 0 and trainer.max_epochs in (None, -1)
        self.endless = unlimited and not self._timers

    def state_dict(self) -> dict[str, float]:
        """What is needed to continue with epochs of another number of steps."""
        return {"epoch_steps": self._epoch_steps, "ahead": self._ahead}

    def load_state_dict(self, state: Mapping[str, float], step: int) -> None:
        """Continue after `step` from where the epochs were."""
        before = state["epoch_steps"]
        self._ahead = state["ahead"]
        if before and before != self._epoch_steps:
            self._ahead = (step + self._ahead) * self._epoch_steps / before - step

    def __call__(self, step: int) -> float:
        """The share done after `step`."""
        # The step that is about to be taken counts, so that the first one moves the weights. (With
        # a limit in time alone it does not: how long a step takes is not known yet.)
        spent = [0.0]
        if self._steps:
            spent.append((step + 1) / self._steps)
        if self._epoch_steps:
            spent.append((step + self._ahead + 1) / (self._epoch_steps * self._epochs))
        for timer in self._timers:
            elapsed, left = timer.time_elapsed(), timer.time_remaining()
            assert left is not None
            spent.append(elapsed / max(1e-9, elapsed + left))
        share = min(1.0, max(spent))
        if self._timers and self._trainer.world_size > 1:
            # Clocks differ, and processes whose steps differ would drift apart.
            own = torch.tensor(share, device=self._trainer.strategy.root_device)
            share = float(self._trainer.strategy.reduce(own, reduce_op="mean"))
        return share
