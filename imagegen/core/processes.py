"""Which of the processes of a run this one is, as its environment says."""

from __future__ import annotations

import os


def is_first_process() -> bool:
    """Whether this is the only or the first process of a run; the others share its folder."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    return all(os.environ.get(name, "0") == "0" for name in ranks)


def launched_processes() -> int:
    """How many processes torchrun or srun have started for this run; 1 without them."""
    if "RANK" in os.environ:
        return int(os.environ.get("WORLD_SIZE", "1"))
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
