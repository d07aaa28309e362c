"""Watches the normalisers of linear attention while a model trains: `callbacks=debug`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from imagegen.attention.linear import LinearAttention

METRIC = "debug/normalizer_min"


def row_due(trainer: Trainer, step: int) -> bool:
    """Whether a row of the log is due after a step; 0 for `log_every_n_steps` writes none."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and step % every == 0


class NormalizerWatch(Callback):
    """Logs `debug/normalizer_min` where a row of the log is due.

    It is the least normaliser of all linear attention layers, those of hybrids among them, and of
    all training batches since it was logged last; validation and drawing do not count. Outputs are
    divided by their normaliser, so they and their gradients grow where it comes close to zero. See
    `LinearAttention.normalizer_observer` for its units.

    A model that has no such layer trains as it does without this, and a line on stderr says so:
    other watchers, and the other runs of a multirun, may still have something to tell.
    """

    def __init__(self) -> None:
        self._layers: list[LinearAttention] = []
        self._least: Tensor | None = None
        self._logged_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the layers."""
        self._layers = [m for m in pl_module.modules() if isinstance(m, LinearAttention)]
        self._logged_step = trainer.global_step
        if not self._layers and trainer.is_global_zero:
            print(
                f"{METRIC} is not logged: this model has no linear attention, whose normalisers "
                "it watches",
                file=sys.stderr,
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look from here."""
        self._watch(True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look away, and log where a row of the log is due."""
        self._watch(False)
        step = trainer.global_step
        # Batches whose gradients are accumulated do not raise the step.
        due = step != self._logged_step and row_due(trainer, step)
        if due and self._least is not None:
            several = trainer.world_size > 1
            pl_module.log(METRIC, self._least, reduce_fx="min", sync_dist=several)
            self._logged_step, self._least = step, None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the layers as they were."""
        self._watch(False)
        self._least = None

    def _watch(self, on: bool) -> None:
        for layer in self._layers:
            layer.normalizer_observer = self._observe if on else None

    def _observe(self, normalizer: Tensor) -> None:
        least = normalizer.amin()
        self._least = least if self._least is None else torch.minimum(self._least, least)
