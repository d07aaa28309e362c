"""The LightningModule: loss, metrics, optimizer."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torchmetrics import MeanMetric

from imagegen.data.loading import Batch
from imagegen.model import ImageTransformer
from imagegen.optimizers import OptimizerFactory, build_optimizer
from imagegen.schedules import training_progress


@runtime_checkable
class Schedule(Protocol):
    """Says how the learning rate moves; see `imagegen.schedules`."""

    def factor(self, progress: float) -> float:
        """The factor on the learning rate when `progress` of the training, 0 to 1, is done."""
        ...


class ImageModule(LightningModule):
    """Trains an `ImageTransformer` by maximum likelihood.

    The loss is bits/dim: the negative log2-likelihood, averaged over dimensions and images.

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
        # By default, what is no number would be left out.
        self.val_bits_per_dim = MeanMetric(nan_strategy="disable")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean bits/dim of a batch, a random half of it mirrored if the model knows of that."""
        images, flipped = batch["images"], None
        if self.model.flip is not None:
            flipped = torch.rand(len(images), device=images.device) < 0.5
            images = torch.where(flipped.view(-1, 1, 1, 1), images.flip(2), images)
        loss = self.model.bits_per_dim(images, batch.get("labels"), flipped).mean()
        # Each process has a share of the batch; one alone would report its own.
        several = self.trainer.world_size > 1
        self.log(
            "train/bits_per_dim", loss, prog_bar=True, batch_size=len(images), sync_dist=several
        )
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds the bits/dim of each image, so that every image weighs the same."""
        images = batch["images"]
        self.val_bits_per_dim.update(self.model.bits_per_dim(images, batch.get("labels")))
        self.log("val/bits_per_dim", self.val_bits_per_dim, prog_bar=True, batch_size=len(images))

    def configure_optimizers(self) -> Any:
        """The optimizer, and the schedule stepped with it."""
        optimizer = build_optimizer(self.optimizer_factory, self.model)
        if self.schedule is None:
            return optimizer
        schedule, progress = self.schedule, training_progress(self.trainer)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: schedule.factor(progress(step))
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
