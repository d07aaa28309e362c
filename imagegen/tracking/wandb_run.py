"""A wandb run with one row per step and the checkpoints, of which nothing can stop a training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from imagegen.core.errors import first_line
from imagegen.tracking.wandb_file import STEP


class WandbRun(WandbLogger):
    """Lightning's logger with four differences.

    What is logged at one step makes one row, whose wandb step it is. A resumed run has each row
    once, wherever it was killed. Checkpoints are artifacts `model-ID` with the aliases `best` and
    `last`. And where wandb fails, a line says so and the training continues without it.

    Args:
        run: started with `wandb.init`; None in all processes but the first.
        run_dir: the run folder.
        project: of the run.
        upload: True uploads checkpoints at the end, "all" each when it is written.
    """

    def __init__(
        self,
        run: Any,
        run_dir: Path,
        project: str | None = None,
        upload: bool | str = False,
    ) -> None:
        super().__init__(save_dir=run_dir, project=project, experiment=run)
        self.upload = upload
        self._step = 0
        self._row: dict[str, Any] = {}
        self._checkpoints: dict[str, ModelCheckpoint] = {}
        self._failed = False
        self._numbered = True

    @rank_zero_only
    def go_on(self, written: int, rows: Iterable[Mapping[str, str]]) -> None:
        """Continue a run that was stopped or killed.

        Args:
            written: the last step whose row wandb has; rows up to it, which come again, are left
                out.
            rows: of metrics.csv, up to the checkpoint; those that wandb lacks are made up for.
        """
        self._step = written + 1
        self._attempt(self._compare_numbers)
        for row in rows:
            values = {key: float(value) for key, value in row.items() if value and key != "step"}
            self.log_metrics(values, int(row["step"]))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add to the row of `step`, which is written when one of a later step begins."""
        step = self._step if step is None else step
        if step > self._step:
            self._write_row()
            self._step = step
        if step == self._step:
            self._row.update(metrics)

    @rank_zero_only
    def log_pixels(self, key: str, image: UInt8[np.ndarray, "h w c"], step: int) -> None:
        """Add an image, pixel for pixel, to the row of `step`."""
        self._attempt(lambda: self.log_metrics({key: [_picture(image)]}, step))

    def after_save_checkpoint(self, checkpoint_callback: Checkpoint) -> None:
        """Upload it, or remember it for the end."""
        if self.upload and isinstance(checkpoint_callback, ModelCheckpoint):
            alias = "best" if checkpoint_callback.monitor else "last"
            self._checkpoints[alias] = checkpoint_callback
            if self.upload == "all":
                self._upload_checkpoints()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Nothing: Lightning calls this whenever a trainer stops; see `finish`."""

    @rank_zero_only
    def finish(self, success: bool, steps: int | None = None) -> None:
        """End the wandb run.

        Args:
            success: whether the training ended well; else the run is marked as failed, and the
                checkpoints that are still to be uploaded are not.
            steps: optimizer steps done; the row of a step that was not done is left out.
        """
        if steps is None or self._step < steps:
            self._write_row()
        if success:
            self._upload_checkpoints()
        self._attempt(lambda: self.experiment.finish(exit_code=0 if success else 1))

    def _write_row(self) -> None:
        row, self._row = {**self._row, STEP: self._step}, {}
        if len(row) > 1:
            step = self._step if self._numbered else None
            self._attempt(lambda: self.experiment.log(row, step=step, commit=True))

    def _compare_numbers(self) -> None:
        # Earlier versions numbered rows by themselves, and wandb takes no number twice.
        self._numbered = self.experiment.step <= self._step

    def _upload_checkpoints(self) -> None:
        while self._checkpoints:
            self._attempt(partial(self._upload_one, *self._checkpoints.popitem()))

    def _upload_one(self, alias: str, callback: ModelCheckpoint) -> None:
        import wandb

        path = Path(callback.best_model_path)
        score = callback.best_model_score if callback.monitor else None
        metadata = {} if score is None else {str(callback.monitor): float(score)}
        artifact = wandb.Artifact(f"model-{self.experiment.id}", type="model", metadata=metadata)
        artifact.add_file(str(path), name=path.name)
        self.experiment.log_artifact(artifact, aliases=[alias])

    def _attempt(self, action: Callable[[], Any]) -> None:
        if self._failed:
            return
        try:
            action()
        except Exception as error:  # Whatever is wrong there, the training matters more.
            self._failed = True
            print(
                f"wandb: it has failed ({first_line(error)[:200]}), so the run continues without "
                "it; metrics.csv has everything",
                file=sys.stderr,
            )


def _picture(image: UInt8[np.ndarray, "h w c"]) -> Any:
    import wandb
    from PIL import Image

    pixels = image[..., 0] if image.shape[-1] == 1 else image
    return wandb.Image(Image.fromarray(np.ascontiguousarray(pixels)))
