"""The folder of a training run: what it holds, and who may write to it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from imagegen.core.errors import UserError
from imagegen.core.files import lock_folder
from imagegen.core.override_syntax import argument
from imagegen.core.processes import is_first_process

LAST = Path("checkpoints", "last.ckpt")
"""Where a run folder keeps the checkpoint to continue from."""

AUTO = "auto"
"""`resume=auto`: continue the run in `hydra.run.dir` if it exists, else start it there."""

_RUN_FILES = ("checkpoints", "summary.json", "metrics.csv")


def run_folder_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint file is in, or None."""
    folder = checkpoint.parent
    return folder.parent if folder.name == LAST.parent.name else None


def refuse_used_folder(cfg: Any, run_folder: Path) -> None:
    """Refuse a new run in the folder of another, before anything is written there.

    Args:
        cfg: the configuration, with `resume`.
        run_folder: where the run is to go.

    Raises:
        UserError: if the folder holds a run's files and `cfg.resume` is not set.
    """
    if cfg.get("resume") is not None:
        return
    found = [name for name in _RUN_FILES if (run_folder / name).exists()]
    if found:
        raise UserError(
            f"{run_folder} holds the {found[0]} of an earlier run; choose another hydra.run.dir, "
            f"or continue that run with {argument('resume', run_folder)}."
        )


@contextlib.contextmanager
def claim_run_folder(folder: Path, resuming: bool) -> Iterator[None]:
    """Keep a run folder for this process alone while the block runs.

    Two runs that started in the same second, or a run resumed while it still runs, would
    otherwise write to the same files. The lock ends with the process, however that ends. Further
    processes of a distributed run need none.

    Args:
        folder: the run folder, which exists.
        resuming: whether an earlier run is continued; else the folder must hold no run's files.

    Raises:
        UserError: if another process holds or has removed the folder, or a fresh run would
            overwrite another.
    """
    if not is_first_process():
        yield
        return
    refuse_used_folder({"resume": True if resuming else None}, folder)
    try:
        lock = lock_folder(folder)
    except BlockingIOError as error:
        raise UserError(
            f"another run is writing to {folder}; wait for it to end, or choose another "
            "hydra.run.dir."
        ) from error
    except FileNotFoundError as error:
        raise UserError(
            f"another run that ended before its first step has just removed {folder}; start this "
            "one again."
        ) from error
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def has_finished(folder: Path) -> bool:
    """Whether the summary in a run folder says that the run has finished."""
    try:
        return bool(json.loads((folder / "summary.json").read_text())["state"] == "finished")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def remove_if_unused(folder: Path) -> None:
    """Remove a run folder that holds a log at most: no run has begun in it."""
    if is_first_process() and {path.name for path in folder.iterdir()} <= {"train.log"}:
        # Its log is opened by the first line, which may still come.
        for handler in list(logging.root.handlers):
            if isinstance(handler, logging.FileHandler):
                if Path(handler.baseFilename).parent == folder:
                    logging.root.removeHandler(handler)
                    handler.close()
        shutil.rmtree(folder, ignore_errors=True)
