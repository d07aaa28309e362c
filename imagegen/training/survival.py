"""What lets a run be killed at any moment, moved by a scheduler, and continued."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from imagegen.training.processes import Diverged


class FirstCheckpoint(Callback):
    """Writes a checkpoint before the first step, so that a run killed early is resumed as well.

    Args:
        path: of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write it, unless the run itself is a resumed one."""
        if trainer.ckpt_path is None:
            trainer.save_checkpoint(self.path)


class WholeSteps(Callback):
    """Lets an error write a checkpoint only while no step is half done.

    From the moment that the optimizer moves the weights until the next step begins, or while
    gradients wait for the batches to come, an error (a second Ctrl-C, a callback that fails) leaves
    the last checkpoint as it was: resumed, it takes the very steps again. So does an error before
    the first step, and a model that has diverged: its last weights may be what it diverges from.
    """

    def __init__(self) -> None:
        self._checkpoints: list[ModelCheckpoint] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the checkpoints that errors write."""
        self._checkpoints = [
            callback
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and callback.save_on_exception
        ]
        self._allow(False)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Nothing is half done where a step begins."""
        self._allow(batch_idx % trainer.accumulate_grad_batches == 0)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """From here on it is."""
        self._allow(False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Nor while gradients wait."""
        self._allow(False)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Nor is what has diverged kept."""
        if isinstance(exception, Diverged):
            self._allow(False)

    def _allow(self, allowed: bool) -> None:
        for checkpoint in self._checkpoints:
            checkpoint.save_on_exception = allowed


class KeepUnvalidated(Callback):
    """Saves what is kept after each validation where there is none: when the run stops, and after
    each epoch.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if this was the last step."""
        if trainer.should_stop:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after a whole epoch; one that was stopped has been saved as such."""
        if not trainer.should_stop:
            self._save(trainer)

    @staticmethod
    def _save(trainer: Trainer) -> None:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.monitor is None:
                folder, name = Path(str(callback.dirpath)), str(callback.filename)
                trainer.save_checkpoint(folder / f"{name}.ckpt")


def requeue_job() -> bool:
    """Ask SLURM to run this job again, and say what came of it.

    Returns:
        Whether SLURM has agreed.
    """
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    except OSError as error:
        why = error.strerror or str(error)
    else:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
        if done.returncode == 0:
            print(f"SLURM runs job {job} again", file=sys.stderr)
            return True
    print(f"SLURM could not be asked to run job {job} again: scontrol: {why}", file=sys.stderr)
    return False
