"""The LightningModule: loss, metrics, optimizer."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.utilities import GradClipAlgorithmType
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

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """One step, whose gradients are unscaled before anything looks at them or clips them.

        Lightning leaves that to an optimizer which does it in its own step, as fused ones do; told
        by the gradient scaler that it is done, the optimizer does not do it again.
        """
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)

        def closure() -> Any:
            loss = optimizer_closure()
            if scaler is not None and _unscales(optimizer.optimizer):
                scaler.unscale_(optimizer.optimizer)
            return loss

        optimizer.step(closure=closure)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        """Clip in mixed precision too where the optimizer is a fused one.

        Lightning refuses that (its issue 21435), because it would clip scaled gradients.
        """
        plugin = self.trainer.precision_plugin
        if gradient_clip_val and _unscales(optimizer) and isinstance(plugin, MixedPrecision):
            algorithm = gradient_clip_algorithm or GradClipAlgorithmType.NORM
            Precision.clip_gradients(plugin, optimizer, gradient_clip_val, algorithm)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

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


def _unscales(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer divides gradients by the scale of a loss itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
