"""The LightningModule: loss, metrics, optimizer."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor
from torchmetrics import MeanMetric

from imagegen.core.errors import UserError
from imagegen.data.loading import Batch
from imagegen.data.random_regions import random_regions
from imagegen.model.orientations import turn
from imagegen.model.transformer import ImageTransformer
from imagegen.training.lightning_fixes import clip_gradients, step
from imagegen.training.optimizers import OptimizerFactory, build_optimizer
from imagegen.training.schedules import TrainingProgress

PROGRESS = "schedule"
"""Where a checkpoint keeps `TrainingProgress.state_dict`."""


@runtime_checkable
class Schedule(Protocol):
    """Says how the learning rate moves; see `imagegen.training.schedules`."""

    def factor(self, progress: float) -> float:
        """The factor on the learning rate when `progress` of the training, 0 to 1, is done."""
        ...


REGION_IMAGES = 64
"""Validation images that are scored with regions too: few, because of the time it takes."""


class ImageModule(LightningModule):
    """Trains an `ImageTransformer` by maximum likelihood.

    The loss is bits/dim: the negative log2-likelihood, averaged over dimensions and images. Models
    of any order are given a random region of each training image, whose visible values have the
    weight `model.visible_weight` in that average, over all values of the batch: each missing value
    weighs the same, whether it is one of few or of a whole image. Visible values are computed
    anyway; learning them too, each from the visible ones before, made most missing ones better
    (docs/regions.md).

    Args:
        model: the network.
        optimizer: makes an optimizer of the network's parameters.
        schedule: of the learning rate; constant by default.
    """

    def __init__(
        self,
        model: ImageTransformer,
        optimizer: OptimizerFactory,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer_factory = optimizer
        self.schedule = schedule
        self._optimizer_options: list[dict[str, Any]] = []
        self._progress: TrainingProgress | None = None
        self._restored: dict[str, float] | None = None
        # By default, nan would be left out.
        self.val_bits_per_dim = MeanMetric(nan_strategy="disable")
        self.val_bits_per_hidden_value = MeanMetric(nan_strategy="disable")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The `loss` of a batch, logged."""
        loss, images = self.loss(batch), batch["images"]
        # Each process has a share of the batch; one alone would report its own.
        several = self.trainer.world_size > 1
        self.log(
            "train/bits_per_dim",
            loss,
            prog_bar=self._shows_progress,
            batch_size=len(images),
            sync_dist=several,
        )
        return loss

    def loss(self, batch: Batch) -> Tensor:
        """Mean bits/dim of a batch, each image in a random one of the model's orientations."""
        images, orientation = batch["images"], None
        if self.model.orders > 1:
            random = torch.rand(len(images), device=images.device) * self.model.orders
            # Small numbers mirrored images when there were no other orientations.
            orientation = self.model.orders - 1 - random.long()
            images = turn(images, orientation)
        if self.model.order == "any":
            return self._region_loss(images, batch.get("labels"), orientation)
        return self.model.bits_per_dim(images, batch.get("labels"), orientation).mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds the bits/dim of each image, so that every image weighs the same.

        For models of any order that is drawn from nothing, as others draw; the first images are
        scored with regions as well, the same ones every time.
        """
        images = batch["images"]
        self.val_bits_per_dim.update(self.model.bits_per_dim(images, batch.get("labels")))
        self.log(
            "val/bits_per_dim",
            self.val_bits_per_dim,
            prog_bar=self._shows_progress,
            batch_size=len(images),
        )
        if self.model.order == "any" and batch_idx * len(images) < REGION_IMAGES:
            # On the CPU, so that every device scores the same regions.
            generator = torch.Generator().manual_seed(batch_idx)
            visible = self._regions(images, 0.0, generator)
            bits = self.model.bits_per_dim(images, batch.get("labels"), visible=visible)
            hidden = (~visible).flatten(1).sum(dim=1)
            self.val_bits_per_hidden_value.update(bits, hidden)
            self.log(
                "val/bits_per_hidden_value",
                self.val_bits_per_hidden_value,
                batch_size=len(images),
            )

    def _region_loss(
        self, images: Tensor, labels: Tensor | None, orientation: Tensor | None
    ) -> Tensor:
        """Mean bits of the values of a batch, in the order of a random region of each image."""
        visible = self._regions(images, self.model.whole_images)
        nats = -self.model.log_prob(images, labels, orientation, visible).mean(dim=2)
        kept = self.model.raster.kept_steps(visible)
        step = torch.arange(nats.shape[1], device=nats.device)
        weight = torch.where(step < kept.unsqueeze(1), self.model.visible_weight, 1.0)
        return (nats * weight).sum() / (weight.sum() * math.log(2))

    def _regions(
        self, images: Tensor, whole: float, generator: torch.Generator | None = None
    ) -> Tensor:
        device = images.device if generator is None else generator.device
        height, width = images.shape[1:3]
        visible = random_regions(len(images), height, width, whole, device, generator)
        return visible.to(images.device)

    @property
    def _shows_progress(self) -> bool:
        """Whether there is a progress bar: Lightning reads back what it would show there."""
        return self.trainer.progress_bar_callback is not None

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """One step, whose gradients are unscaled before anything looks at them or clips them."""
        step(self.trainer, optimizer, optimizer_closure)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        """Clip, in mixed precision too where the optimizer is a fused one."""
        clip_gradients(self, optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_optimizers(self) -> Any:
        """The optimizer, and the schedule stepped with it.

        Raises:
            UserError: for a schedule that needs an end where the training has none.
        """
        optimizer = build_optimizer(self.optimizer_factory, self.model)
        self._optimizer_options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        if self.schedule is None:
            return optimizer
        schedule = self.schedule
        self._progress = progress = TrainingProgress(self.trainer)
        if progress.endless and len({schedule.factor(share) for share in (0.0, 0.5, 1.0)}) > 1:
            raise UserError(
                f"the schedule {type(schedule).__name__} follows the training to its end, but this "
                "training has none; limit it with trainer.max_epochs, trainer.max_steps or "
                "trainer.max_time, or choose scheduler=constant."
            )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: schedule.factor(progress(step))
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add how many steps an epoch has."""
        if self._progress is not None:
            checkpoint[PROGRESS] = self._progress.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the trained weights where the checkpoint also holds their moving average."""
        self._restored = checkpoint.get(PROGRESS)
        averaged = [c for c in self.trainer.callbacks if isinstance(c, WeightAveraging)]  # type: ignore[attr-defined]
        if not averaged and "current_model_state" in checkpoint:
            checkpoint["state_dict"] = checkpoint["current_model_state"]

    def on_train_start(self) -> None:
        """Give a resumed optimizer, which keeps its moments, the options of this run."""
        if self.trainer.ckpt_path is None:
            return
        groups = self.trainer.optimizers[0].param_groups
        for group, options in zip(groups, self._optimizer_options, strict=True):
            group.update(options, initial_lr=options["lr"])
        if self._progress is None:
            return
        scheduler: Any = self.trainer.lr_scheduler_configs[0].scheduler
        if self._restored is not None:
            self._progress.load_state_dict(self._restored, scheduler.last_epoch)
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        for group, factor in zip(groups, scheduler.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * factor(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in groups]
