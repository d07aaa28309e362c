"""What happens when a loss or a gradient is not a number: it never goes unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor

from imagegen.core.errors import UserError
from imagegen.training.processes import Diverged

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
        """The count, so that a resumed run goes on with it."""
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
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
