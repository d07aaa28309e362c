"""All that touches private names of Lightning, each with the upstream issue that it waits for.

pyproject.toml keeps Lightning below its next minor version, whose private names may be others;
`tests/training/test_lightning_fixes.py` says which ones there have to be. Numbers are those of
Lightning-AI/pytorch-lightning.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as ScriptLauncher,
)
from pytorch_lightning.utilities import GradClipAlgorithmType
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

__all__ = ["ScriptLauncher"]


def quiet_lightning() -> None:
    """Silence what Lightning says of things that are as they should be."""
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    # The folder of a run that continues holds its checkpoints.
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    # Lightning 2.6 asks torch's pytree in the old way, which a user cannot change.
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\).*")
    # What differs from the run until now has been said, or begins afresh.
    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks used to")
    warnings.filterwarnings("ignore", "The checkpoint was not created with WeightAveraging")
    # Small data sets make short epochs; rows of the log are then further apart than epochs.
    warnings.filterwarnings("ignore", "The number of training batches .* is smaller")
    # A gradient scaler leaves out the first steps while its scale is too large; the schedule counts
    # them nevertheless, as the limits of a run do.
    warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before")


def use_launcher(trainer: Trainer, launcher: ScriptLauncher) -> None:
    """Let a trainer that has not started use this launcher of processes.

    Waits for issues 17248 (a launcher that can be extended) and 8130 (processes hang once one of
    them has failed): the launcher has no public name, and no strategy takes another one.
    """
    trainer.strategy._launcher = launcher


def restore_loaders(trainer: Trainer) -> None:
    """Give loaders the state that the checkpoint holds, at the start of a training.

    Waits for issue 20550: Lightning restores its loaders when it makes them, which is before it
    reads the checkpoint if the schedule has read the number of steps; and in the middle of an
    epoch only, though after its end the pass through the data may have another number.
    """
    loop = trainer.fit_loop
    if loop._combined_loader_states_to_load and loop._combined_loader is not None:
        loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []


def gradients_wait(trainer: Trainer) -> bool:
    """Whether gradients of some batches wait for further ones.

    No upstream issue found: Lightning does not tell, nor does it keep them in a checkpoint.
    """
    return trainer.fit_loop.epoch_loop._should_accumulate()


def count_rows(trainer: Trainer) -> None:
    """Log what follows under the number of optimizer steps done.

    Waits for issues 18060 and 19815: Lightning keeps a second count for its loggers, and guesses
    on resuming whether the checkpoint was written before or after it was raised.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def end_no_epoch_twice(trainer: Trainer) -> None:
    """Let a run that is resumed at the end of an epoch begin the next one.

    Waits for issue 19617: where steps are limited, Lightning ends that epoch again, without its
    metrics.
    """
    trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]


def unscales(optimizer: Optimizer) -> bool:
    """Whether the optimizer divides gradients by the scale of a loss itself, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step(trainer: Trainer, optimizer: Any, closure: Callable[[], Any]) -> None:
    """An optimizer step whose gradients are unscaled before anything looks at them or clips them.

    Waits for issue 21435: Lightning leaves the unscaling to an optimizer that does it in its own
    step. Told by the gradient scaler that it is done, the optimizer does not do it again.

    Args:
        trainer: in training.
        optimizer: Lightning's wrapper of it.
        closure: computes the gradients and returns the loss.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)

    def unscaled() -> Any:
        loss = closure()
        if scaler is not None and unscales(optimizer.optimizer):
            scaler.unscale_(optimizer.optimizer)
        return loss

    optimizer.step(closure=unscaled)


def clip_gradients(
    module: LightningModule, optimizer: Optimizer, value: float | None, algorithm: Any
) -> None:
    """Clip in mixed precision too where the optimizer is a fused one.

    Waits for issue 21435: Lightning refuses that, because it would clip scaled gradients.
    """
    plugin = module.trainer.precision_plugin
    if value and unscales(optimizer) and isinstance(plugin, MixedPrecision):
        Precision.clip_gradients(plugin, optimizer, value, algorithm or GradClipAlgorithmType.NORM)
    else:
        module.clip_gradients(optimizer, value, algorithm)


class OwnAverage(WeightAveraging):
    """Lightning's weight averaging of an `AveragedModel` that is made here.

    No upstream issue found: Lightning builds PyTorch's own, whose update reads its count back from
    the device several times in each step.
    """

    def make(self, trainer: Trainer, pl_module: LightningModule) -> AveragedModel:
        """The average, at the start of a training."""
        raise NotImplementedError

    @property
    def averages(self) -> bool:
        """Whether there is an average yet."""
        return self._average_model is not None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin the average, where a training begins."""
        if stage == "fit":
            self._average_model = self.make(trainer, pl_module)
