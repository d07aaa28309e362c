"""All that ends or interrupts a run: limits, bad numbers, Ctrl-C, signals, a killed machine.

From the gentlest to the hardest: a run reaches `max_steps` (`StopWhole`) or does not improve any
more (`early_stopping`); a number is not finite (`BadNumbers`); Ctrl-C, SIGTERM or SLURM ask it to
stop between two steps (`Interruptible`); an error comes anywhere, which writes a checkpoint only
where no step is half done (`WholeSteps`). Checkpoints themselves are written by
`imagegen.training.checkpoint_callbacks`; Ctrl-C before and after the training is a matter of
`imagegen.cli.entry`, as in every command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor

from imagegen.core.errors import UserError
from imagegen.core.processes import is_first_process
from imagegen.core.values import whole_number


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, heeded by all processes of a run at the same step."""


class Diverged(UserError):
    """A result that is nan or infinite, seen by all processes of a run at the same step."""


TOGETHER = (Interrupted, Diverged)
"""What stops all processes at the same step, so that they can still save together."""


class StopWhole(Callback):
    """Ends a run at `max_steps` the way its other limits end it: with a validation."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask for the end once the steps are spent."""
        if 0 < trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True


def early_stopping(patience: int | None, **options: Any) -> Callback:
    """Lightning's `EarlyStopping`, or a callback that does nothing without a patience.

    Args:
        patience: validations without an improvement after which the run ends; None never ends it.
        options: the further arguments of `EarlyStopping`.

    Raises:
        UserError: for a patience below 1.
    """
    if patience is None:
        return Callback()
    least = whole_number(patience, "callbacks.early_stopping.patience", 1)
    return EarlyStopping(patience=least, **options)


POLICIES = ("stop", "skip")
MOST_IN_A_ROW = 10


class BadNumbers(Callback):
    """Looks at the gradients before each optimizer step; a loss of nan or inf shows in them.

    `stop` ends the run before the weights are touched. `skip` leaves the step out, weights and
    optimizer as they are, counts it as `train/skipped_steps`, says so, and stops all the same after
    ten in a row. A validation that is not a number stops the run.

    Whether the norm of all gradients is finite is the one number of an optimizer step that the
    program reads back from the device. A GPU then has no work until the program has told it the
    next, and that is the price of a stop before the weights are touched: an optimizer cannot be
    told on the device to leave a step out, except those of PyTorch with `fused=True`.

    In `16-mixed` the gradient scaler itself leaves out steps whose gradients overflow, and halves
    the scale of the loss. Such a step counts as a bad one only where the loss is not a number
    either, or where the scale has come down to 1 and gradients still overflow.

    Args:
        policy: `stop` or `skip`.
        folder: the run folder.

    Raises:
        UserError: for another policy.
    """

    def __init__(self, policy: str, folder: Path) -> None:
        if policy not in POLICIES:
            raise UserError(f"on_nan={policy} is unknown; it can be {' or '.join(POLICIES)}.")
        self.policy = policy
        self.folder = folder
        self.skipped = 0
        self._in_a_row = 0
        self._indices: list[Tensor] = []
        self._losses: list[Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        """The count, so that a resumed run continues it."""
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the count."""
        self.skipped = state_dict["skipped"]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember, on the device, which images the step is about."""
        self._indices.append(batch["indices"])

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Remember the losses of the step."""
        self._losses.append(loss.detach())

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Stop, or leave the step out, where a gradient is not finite."""
        indices, self._indices = self._indices, []
        losses, self._losses = self._losses, []
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        # One number to look at, whatever the number of parameters and of processes, which share
        # their gradients, but of which FSDP leaves each of them a part only.
        norm = torch.nn.utils.get_total_norm(gradients).to(pl_module.device)
        norm = cast(Tensor, trainer.strategy.reduce(norm, reduce_op="sum"))
        if norm.isfinite():
            self._in_a_row = 0
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            finite = bool(torch.stack(losses).isfinite().all())
            if trainer.strategy.reduce_boolean_decision(finite) and scaler.get_scale() > 1:
                return
        what = (
            f"the loss or a gradient is not a number at step {trainer.global_step + 1}, with the "
            f"training images {_all_indices(trainer, indices)}"
        )
        self.skipped += 1
        self._in_a_row += 1
        if self.policy == "stop" or self._in_a_row >= MOST_IN_A_ROW:
            again = "" if self.policy == "stop" else f", for the {self._in_a_row}th time in a row"
            wider = "" if scaler is None else "choose trainer.precision=bf16-mixed, "
            raise Diverged(
                f"{what}{again}; the weights are as before, {self._last_good()}. Lower "
                f"optimizer.lr, {wider}or leave such steps out with on_nan=skip."
            )
        # An optimizer passes over parameters without a gradient.
        for parameter in pl_module.parameters():
            parameter.grad = None
        pl_module.log("train/skipped_steps", float(self.skipped))
        _say(f"{what}: left out")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop where the validation's result is not finite."""
        found = trainer.callback_metrics.get("val/bits_per_dim")
        if found is not None and not trainer.sanity_checking and not found.isfinite():
            raise Diverged(
                f"the validation after step {trainer.global_step} gives {found.item()} bits/dim: "
                f"the model has diverged, {self._last_good()}. Lower optimizer.lr."
            )

    def _last_good(self) -> str:
        checkpoint = self.folder / "checkpoints" / "best.ckpt"
        if checkpoint.exists():
            return f"and the best checkpoint so far is {checkpoint}"
        if (last := checkpoint.with_name("last.ckpt")).exists():
            return f"and the last checkpoint is {last}"
        return "and no checkpoint has been written yet"


def _all_indices(trainer: Trainer, batches: list[Tensor]) -> list[int]:
    """The images of these batches, in all processes."""
    own = torch.cat(batches).tolist()
    found: list[list[int]] = [own]
    if trainer.world_size > 1:
        found *= trainer.world_size
        torch.distributed.all_gather_object(found, own)
    return [index for indices in found for index in indices]


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)


class Interruptible(Callback):
    """Lets Ctrl-C and SIGTERM take effect between two steps, so that none is lost or done twice.

    A second one of the same kind stops at once. In a job of SLURM so do SIGUSR1 and SIGUSR2, its
    warnings (the first by convention, the second in jobs of submitit) that the machine is soon
    taken away; `preempted` then tells that the job is to be run again. Several processes stop at
    the same step, whichever of them is asked to, and save together; what stops only one of them
    saves nothing, because it would wait for the others.
    """

    def __init__(self) -> None:
        self.preempted = False
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signal over, where that is possible."""
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if "SLURM_JOB_ID" in os.environ:
                # Lightning would save at once, in the middle of a step, and elsewhere; submitit
                # would raise an error wherever the run is.
                numbers += [signal.SIGUSR1, signal.SIGUSR2]
            for number in numbers:
                self._before[number] = signal.signal(number, self._ask)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Stop here if this process, or another one, has been asked to.

        Not while gradients of earlier batches wait for their step.
        """
        if batch_idx % trainer.accumulate_grad_batches:
            return
        if trainer.strategy.reduce_boolean_decision(self._asked, all=False):
            raise Interrupted

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save only what all processes can save together."""
        if trainer.world_size > 1 and not isinstance(exception, TOGETHER):
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint):
                    callback.save_on_exception = False

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signal back."""
        self._give_back()

    def _ask(self, number: int, frame: object) -> None:
        # SIGTERM may follow the warning, or come before it.
        self.preempted |= number not in (signal.SIGINT, signal.SIGTERM)
        if not self._asked and is_first_process():
            again = "" if self.preempted else "; Ctrl-C again stops at once"
            print(f"\nstopping after this step{again}", file=sys.stderr)
        self._asked = True
        # The other kind may follow without anyone's asking twice: torchrun sends both.
        signal.signal(number, self._before.pop(signal.Signals(number)))

    def _give_back(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())


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


def heed_interrupts() -> None:
    """Undo that Lightning ignores Ctrl-C for good once it has come."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
