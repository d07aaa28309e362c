"""What several runs of one command have in common: a group in wandb, and a table at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from imagegen.core.installation import typed

PLUGINS = {
    "hydra/launcher/joblib": ("hydra-joblib-launcher", "joblib"),
    # No extra: what it needs cannot be pinned together with the rest.
    "hydra/launcher/ray": ("hydra-ray-launcher", None),
    "hydra/launcher/submitit_slurm": ("hydra-submitit-launcher", "slurm"),
    "hydra/sweeper/optuna": ("hydra-optuna-sweeper", "optuna"),
}
"""The package that each engine of `conf/sweep/` needs, and the extra that has it."""


def sweep_group() -> str | None:
    """The name that the runs of this sweep share; None for a run of its own."""
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return None
    folder = Path(hydra.sweep.dir)
    return " ".join(folder.parts[-2:])


class RunsTable(Callback):
    """Prints the table of `imagegen.tracking.runs_table` when all runs of a sweep have ended."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print it."""
        from imagegen.tracking.runs_table import find_runs, print_table, sort_runs

        folder = Path(config.hydra.sweep.dir)
        runs = sort_runs(find_runs([folder]), "best") if folder.is_dir() else []
        if runs:
            print_table(runs, [folder])
            print(f"this table again: {typed('runs')} {folder}")
