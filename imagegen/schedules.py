"""Learning-rate schedules that follow steps or the time budget, whichever is spent sooner."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Timer

from imagegen.errors import UserError


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
                raise UserError(f"scheduler.{name}={value} must lie between 0 and 1.")

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


def training_progress(trainer: Trainer) -> Callable[[int], float]:
    """A function from optimizer steps done to the share of the training done, 0 to 1.

    It looks at the limits in steps or epochs and in time, and takes the one spent sooner.
    """
    limits = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
    timed = any(timer.time_remaining() is not None for timer in limits)
    total = trainer.estimated_stepping_batches

    def progress(step: int) -> float:
        # The step that is about to be taken counts, so that the first one moves the weights. (With
        # a limit in time alone it does not: how long a step takes is not known yet.)
        spent = [(step + 1) / total if math.isfinite(total) and total > 0 else 0.0]
        for timer in limits:
            left = timer.time_remaining()
            if left is not None:
                elapsed = timer.time_elapsed()
                spent.append(elapsed / max(1e-9, elapsed + left))
        share = min(1.0, max(spent))
        if timed and trainer.world_size > 1:
            # Clocks differ, and processes whose steps differ would drift apart.
            own = torch.tensor(share, device=trainer.strategy.root_device)
            share = float(trainer.strategy.reduce(own, reduce_op="mean"))
        return share

    return progress
