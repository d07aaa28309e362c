"""What is watched while a model trains: pictures, rates, and a line for each validation."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Timer
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from imagegen.core.durations import format_seconds
from imagegen.core.values import MAX_SEED, share, whole_number
from imagegen.generation.images import (
    make_completion_grid,
    make_grid,
    save_png,
    to_display,
)
from imagegen.generation.sampling_loop import complete, generate
from imagegen.tracking.loggers import log_images
from imagegen.training.module import ImageModule
from imagegen.training.normalizer_watch import METRIC, NormalizerWatch, row_due


class Grids(Callback):
    """Draws samples and completions of validation images after each validation.

    They go to `samples/` in the run folder and to the logger, pixel for pixel.

    Args:
        folder: where the pictures go.
        n_samples: images in the grid of samples; 0 for no such grid.
        n_completed: validation images that are completed; 0 for no such grid.
        completions: continuations of each.
        visible: share of the rows that a completion keeps.
        every: draw after every this many validations.
        seed: of the drawing, so that grids of one run show the same random numbers.

    Raises:
        UserError: for numbers out of their range.
    """

    def __init__(
        self,
        folder: str | Path,
        n_samples: int = 16,
        n_completed: int = 4,
        completions: int = 3,
        visible: float = 0.5,
        every: int = 1,
        seed: int = 0,
    ) -> None:
        self.folder = Path(folder)
        self.n_samples = whole_number(n_samples, "callbacks.grids.n_samples", 0)
        self.n_completed = whole_number(n_completed, "callbacks.grids.n_completed", 0)
        self.completions = whole_number(completions, "callbacks.grids.completions", 1)
        self.visible = share(visible, "callbacks.grids.visible")
        self.every = max(1, whole_number(every, "callbacks.grids.every", 0))
        self.seed = whole_number(seed, "callbacks.grids.seed", 0, MAX_SEED)
        self._validations = 0

    def state_dict(self) -> dict[str, Any]:
        """The count of validations, so that a resumed run keeps the rhythm."""
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the count."""
        self._validations = state_dict["validations"]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw, in the first process only, while a `WeightAverage` still shows the average."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._validations += 1
        if self._validations % self.every == 0 and trainer.is_global_zero:
            assert isinstance(pl_module, ImageModule)
            if self.n_samples:
                self._emit(trainer, "samples", self._samples(pl_module))
            if self.n_completed:
                self._emit(trainer, "completions", self._completions(trainer, pl_module))

    def _samples(self, module: ImageModule) -> np.ndarray:
        model = module.model
        # Classes in turn, each in a column of its own where there are few.
        labels = None if model.n_classes is None else range(model.n_classes)
        drawn = list(generate(model, self.n_samples, seed=self.seed, labels=labels))
        columns = None if labels is None or len(labels) > self.n_samples else len(labels)
        return make_grid(to_display(np.concatenate(drawn), model.spec.levels), columns)

    def _completions(self, trainer: Trainer, module: ImageModule) -> np.ndarray:
        spec = module.model.spec
        split = trainer.datamodule.split("val")  # type: ignore[attr-defined]
        images = np.ascontiguousarray(split.images[: self.n_completed])
        rows = [round(self.visible * spec.height)] * len(images)
        labels = None
        if module.model.n_classes is not None and split.labels is not None:
            labels = split.labels[: self.n_completed].tolist()
        drawn = complete(
            module.model, images, rows, self.completions, seed=self.seed, labels=labels
        )
        originals, drawn = to_display(images, spec.levels), to_display(drawn, spec.levels)
        return make_completion_grid(originals, drawn, rows)

    def _emit(self, trainer: Trainer, kind: str, grid: np.ndarray) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        save_png(self.folder / f"step-{trainer.global_step:07d}-{kind}.png", grid)
        log_images(trainer.loggers, f"val/{kind}", grid, trainer.global_step)


class Rates(Callback):
    """Logs `train/images_per_second`, over all processes, and `train/gradient_norm`.

    The time that validation takes does not count; the norm is that before clipping.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._images = 0
        self.images_per_second = float("nan")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._restart()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count, and log where a row of the log is due."""
        self._images += len(batch["images"]) * trainer.world_size
        if row_due(trainer, trainer.global_step):
            self._measure()
            pl_module.log("train/images_per_second", self.images_per_second)
            self._restart()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure what has been trained until here."""
        if self._images:
            self._measure()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the validation out."""
        self._restart()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Log the norm of all gradients together."""
        if row_due(trainer, trainer.global_step + 1):
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            pl_module.log("train/gradient_norm", torch.nn.utils.get_total_norm(gradients))

    def _restart(self) -> None:
        self._since, self._images = time.perf_counter(), 0

    def _measure(self) -> None:
        self.images_per_second = self._images / max(1e-9, time.perf_counter() - self._since)


class Report(Callback):
    """Prints a line after each validation."""

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bits/dim, images/s and the time so far."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        metrics = trainer.callback_metrics
        parts = [f"step {trainer.global_step:>6,}", f"epoch {trainer.current_epoch + 1:>3}"]
        for name in ("train", "val"):
            value = metrics.get(f"{name}/bits_per_dim")
            if value is not None:
                parts.append(f"{name} {value.item():.4f}")
        parts[-1] += " bits/dim"
        found = {type(callback): callback for callback in trainer.callbacks}  # type: ignore[attr-defined]
        if Rates in found:
            parts.append(f"{found[Rates].images_per_second:,.0f} images/s")
        if Timer in found:
            parts.append(format_seconds(found[Timer].time_elapsed()))
        pl_module.print("  ".join(parts))


METRICS: dict[type[Callback], tuple[str, ...]] = {
    Rates: ("train/images_per_second", "train/gradient_norm"),
    NormalizerWatch: (METRIC,),
}
"""What callbacks log besides the loss and the validation."""
