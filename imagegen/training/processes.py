"""Runs of several processes: what they agree on before they start.

`trainer=ddp` starts them itself (`imagegen.training.launcher`); torchrun and srun start all of
them from outside. See docs/scaling.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from imagegen.core.errors import UserError
from imagegen.core.processes import launched_processes


def require_one_folder(argv: Sequence[str]) -> list[str]:
    """The arguments, refused where processes that were started apart would not share a run folder.

    By default its name is the second at which a process started.

    Args:
        argv: the arguments, without the program's name; `resume=` has been rewritten.

    Raises:
        UserError: for several processes without `hydra.run.dir=`, or with --multirun.
    """
    apart = launched_processes() > 1 or "NODE_RANK" in os.environ
    if apart and any(text in ("-m", "--multirun", "hydra.mode=MULTIRUN") for text in argv):
        raise UserError(
            "--multirun starts the processes of each run itself; leave out torchrun or srun, or "
            "choose sweep=slurm."
        )
    if apart and not any(text.startswith("hydra.run.dir=") for text in argv):
        raise UserError(
            "several processes were started, which must share one run folder; name it with "
            "hydra.run.dir=outputs/NAME, or continue a run with resume=outputs/NAME."
        )
    return list(argv)


def check_sharding(trainer: Mapping[str, Any], callbacks: Mapping[str, Any]) -> None:
    """Refuse what needs all weights in one process where the strategy leaves each a part of them.

    Args:
        trainer, callbacks: sections of the configuration.

    Raises:
        UserError: for FSDP with clipping by norm, pictures or averaged weights.
    """
    if not str(trainer.get("strategy")).startswith(("fsdp", "deepspeed")):
        return
    grids, ema = callbacks.get("grids") or {}, callbacks.get("ema") or {}
    wrong = {
        "trainer.gradient_clip_val=null": trainer.get("gradient_clip_val") is not None,
        "callbacks.grids=null": bool(grids.get("n_samples") or grids.get("n_completed")),
        "callbacks.ema.decay=null": ema.get("decay") is not None,
    }
    asked = " ".join(option for option, needed in wrong.items() if needed)
    if asked:
        raise UserError(f"trainer.strategy={trainer['strategy']} shards the model; add {asked}.")
