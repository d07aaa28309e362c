"""What lets a run be killed at any moment, moved by a scheduler, and continued."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pytorch_lightning import Callback, LightningModule, Trainer


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
