"""What has been trained, at a glance: `imagegen runs outputs/…`.

A line for each run below the folders: what was asked of it, its best bits/dim, and its state. A
run that holds its folder's lock is running; one that does not, and never said how it ended, has
crashed.
"""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagegen.core.durations import format_seconds
from imagegen.core.errors import UserError
from imagegen.core.files import lock_folder
from imagegen.core.installation import PROJECT_ROOT
from imagegen.tracking.metrics_rows import read_rows

RUNS = PROJECT_ROOT / "outputs"
"""The folder of runs that is meant where none is named."""
STATES = ("running", "finished", "interrupted", "failed", "crashed")
ORDERS = ("best", "folder", "state")
COLUMNS = ("run", "options", "best bits/dim", "steps", "time", "parameters", "state")
WIDTH = 160
"""Columns of a table that no terminal shows."""
_SKIPPED = {"checkpoints", "samples", "wandb", ".hydra", "tensorboard"}


@dataclass(frozen=True)
class Run:
    """A run folder, read.

    Attributes:
        folder: where it is.
        state: one of `STATES`.
        overrides: what the user typed.
        best: lowest validation bits/dim; None before the first validation.
        steps: optimizer steps, as far as they were written down.
        seconds: time trained; None for a run that has not ended.
        parameters: of the model.
    """

    folder: Path
    state: str
    overrides: tuple[str, ...]
    best: float | None
    steps: int
    seconds: float | None
    parameters: int | None


def find_runs(folders: Iterable[Path]) -> Iterator[Run]:
    """The runs in and below the folders.

    Raises:
        UserError: for a folder that does not exist.
    """
    return map(read_run, run_folders(folders))


def run_folders(folders: Iterable[Path]) -> Iterator[Path]:
    """The folders of the runs in and below the folders; nothing in them is read.

    Raises:
        UserError: for a folder that does not exist.
    """
    for root in folders:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; name one that holds runs, such as outputs.")
        for folder, below, names in os.walk(root):
            below[:] = sorted(name for name in below if name not in _SKIPPED)
            if "config.yaml" in names and {"summary.json", "metrics.csv"} & set(names):
                yield Path(folder)


def read_run(folder: Path) -> Run:
    """What the files of a run folder say."""
    summary = _json(folder / "summary.json")
    steps, best = _metrics(folder / "metrics.csv")
    state = str(summary.get("state", "running"))
    if is_locked(folder):
        state = "running"
    elif state == "running":
        state = "crashed"
    known = _given(summary, "best_bits_per_dim", float)
    return Run(
        folder=folder,
        state=state,
        overrides=_overrides(folder / ".hydra" / "overrides.yaml"),
        best=best if known is None else known,
        steps=max(steps, _given(summary, "steps", int) or 0),
        seconds=_given(summary, "seconds", float),
        parameters=_given(summary, "parameters", int),
    )


def is_locked(folder: Path) -> bool:
    """Whether a run holds the folder; False where it has vanished or the system has no locks."""
    try:
        # Shared, so that several readers do not take each other for a run.
        descriptor = lock_folder(folder, shared=True)
    except BlockingIOError:
        return True
    except OSError:
        return False
    if descriptor is not None:
        os.close(descriptor)
    return False


def sort_runs(runs: Iterable[Run], order: str) -> list[Run]:
    """The runs by `best` bits/dim, by `folder` or by `state`."""
    keys: dict[str, Any] = {
        "best": lambda run: (math.inf if run.best is None else run.best, str(run.folder)),
        "folder": lambda run: str(run.folder),
        "state": lambda run: (STATES.index(run.state) if run.state in STATES else 9, run.best or 0),
    }
    return sorted(runs, key=keys[order])


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _given(summary: Mapping[str, Any], name: str, kind: type) -> Any:
    """An entry; None where it is missing or of another kind."""
    value = summary.get(name)
    return value if isinstance(value, kind) else None


def _metrics(path: Path) -> tuple[int, float | None]:
    """The last step and the lowest validation bits/dim of a metrics.csv."""
    steps, best = 0, None
    try:
        for row in read_rows(path):
            steps = int(row["step"] or 0) + 1
            value = float(row.get("val/bits_per_dim") or "nan")
            if not math.isnan(value):
                best = value if best is None else min(best, value)
    except (OSError, LookupError, ValueError, csv.Error):
        pass
    return steps, best


def _overrides(path: Path) -> tuple[str, ...]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return ()
    if not isinstance(found, list):
        return ()
    hidden = ("hydra.", "resume=")
    return tuple(str(text) for text in found if not str(text).startswith(hidden))


def table_of(runs: Sequence[Run], roots: Sequence[Path]) -> tuple[list[str], list[list[str]]]:
    """The options that all runs have in common, and a row of `COLUMNS` for each of the runs."""
    common: set[str] = set()
    if len(runs) > 1:
        common = set.intersection(*(set(run.overrides) for run in runs))
    rows = [
        [
            shown_folder(run.folder, roots),
            " ".join(text for text in run.overrides if text not in common),
            "" if run.best is None else f"{run.best:.4f}",
            f"{run.steps:,}",
            "" if run.seconds is None else format_seconds(run.seconds),
            "" if run.parameters is None else f"{run.parameters:,}",
            run.state,
        ]
        for run in runs
    ]
    return [text for text in runs[0].overrides if text in common] if runs else [], rows


def print_table(runs: Sequence[Run], roots: Sequence[Path]) -> None:
    """One line per run; what all of them have in common is printed above."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    common, rows = table_of(runs, roots)
    if common:
        print("all:", *common)
    table = Table()
    for name in COLUMNS:
        right = name not in ("run", "options", "state")
        fold = name in ("run", "options")
        table.add_column(
            name, justify="right" if right else "left", overflow="fold" if fold else "ellipsis"
        )
    for row in rows:
        # Not as strings, in which rich reads [brackets] as markup.
        table.add_row(*map(Text, row))
    # A pipe has no width, and the one that rich takes for it is too small for options.
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(width=None if known else WIDTH).print(table)


def shown_folder(folder: Path, roots: Sequence[Path]) -> str:
    """A run folder below the roots that were given, as short as is clear."""
    if len(roots) == 1 and folder != roots[0]:
        return str(folder.relative_to(roots[0]))
    return str(folder)
