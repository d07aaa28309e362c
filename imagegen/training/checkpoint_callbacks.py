"""What writes the checkpoints of a run, beside Lightning's `ModelCheckpoint`: checkpoint callbacks.

When an error may write one is decided by `imagegen.training.stopping`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO

from imagegen.checkpoint.reading import KEY
from imagegen.core.files import write_atomic
from imagegen.data.base import ImageDataset
from imagegen.tracking.loggers import logger_state


class AtomicCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name and renames it, so that none is ever half there.

    Lightning's own way renames files of some file systems only, and leaves a truncated one on a
    full disk.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save to `path`."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), buffer.getvalue())


class Metadata(Callback):
    """Puts into each checkpoint what sampling from it needs; see `imagegen.checkpoint.reading`."""

    def __init__(self, metadata: Mapping[str, Any], dataset: ImageDataset) -> None:
        self.metadata = metadata
        self.dataset = dataset

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the entry."""
        names = self.dataset.class_names
        checkpoint[KEY] = {
            **self.metadata,
            "class_names": None if names is None else list(names),
            "logger": logger_state(trainer.loggers),
        }


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
