"""Runs below a folder, read again when their files have changed: what the tab Runs shows."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from imagegen.core.errors import UserError
from imagegen.tracking.curves import Curve, plot_curves, read_curve
from imagegen.tracking.runs_table import (
    Run,
    is_locked,
    read_run,
    run_folders,
    shown_folder,
    sort_runs,
)

FRESH = 0.5
"""Seconds, at least, for which all visitors are told what one of them had looked up."""
MOST_CURVES = 20
"""In one picture; it has no more colours."""
FIRST_CURVES = 5
"""Runs that are chosen until a visitor chooses."""

_FILES = ("config.yaml", "metrics.csv", "summary.json", ".hydra/overrides.yaml", "samples")
_GRID = re.compile(r"step-(\d+)-(\w+)\.png")

Stamp = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True, eq=False)
class Watched:
    """A run as it was read last; the same object until it is read again.

    Attributes:
        curve: the run, and how it learns.
        stamp: time and size of each of its files; of another value once one of them has changed.
    """

    curve: Curve
    stamp: Stamp

    @property
    def run(self) -> Run:
        """The run itself."""
        return self.curve.run


@dataclass(frozen=True)
class Plot:
    """How curves are drawn.

    Attributes:
        against: one of `imagegen.tracking.curves.AGAINST`.
        log, log_bits: whether the lower axis and that of bits/dim are logarithmic.
        width: in inches.
    """

    against: str = "steps"
    log: bool = False
    log_bits: bool = False
    width: float = 10.0


class RunsBelow:
    """The runs in and below a folder.

    Args:
        folder: may come and go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._known: dict[Path, Watched] = {}
        self._found: dict[str, Watched] = {}
        self._stale = -math.inf

    def now(self) -> dict[str, Watched]:
        """The runs by their names, the best first; none where the folder does not exist."""
        with self._lock:
            started = time.monotonic()
            if started >= self._stale:
                there = [self.folder] if self.folder.is_dir() else []
                folders = list(run_folders(there))
                self._known = {folder: self._watched(folder) for folder in folders}
                runs = sort_runs((each.run for each in self._known.values()), "best")
                self._found = {
                    shown_folder(run.folder, [self.folder]): self._known[run.folder] for run in runs
                }
                # Where a look takes long, it is taken less often.
                ended = time.monotonic()
                self._stale = ended + max(FRESH, 20 * (ended - started))
            return self._found

    def picture(self, names: Sequence[str], plot: Plot) -> bytes:
        """The curves of these runs as SVG, those of vanished runs and runs without one left out.

        Raises:
            UserError: where none is left, or too many are, and as `plot_curves`.
        """
        found = self.now()
        there = {name: found[name].curve for name in names if name in found}
        drawn = {name: curve for name, curve in there.items() if curve.known(plot.against)}
        if not drawn:
            said = "is chosen" if not there else f"has logged bits/dim against {plot.against} yet"
            raise UserError(f"no run {said}; choose one that trains or has trained.")
        if len(drawn) > MOST_CURVES:
            raise UserError(f"{len(drawn)} runs are chosen; choose at most {MOST_CURVES} of them.")
        return _drawn(tuple((name, found[name]) for name in drawn), plot)

    def _watched(self, folder: Path) -> Watched:
        """As known, if its files are as they were and a run that ran still does."""
        known, stamp = self._known.get(folder), stamp_of(folder)
        if known is not None and known.stamp == stamp:
            # Others are not asked: whoever resumes one of them must find it free.
            if known.run.state != "running" or is_locked(folder):
                return known
        return Watched(read_curve(read_run(folder)), stamp)


@lru_cache(8)
def _drawn(runs: tuple[tuple[str, Watched], ...], plot: Plot) -> bytes:
    curves = {name: each.curve for name, each in runs}
    return plot_curves(curves, plot.against, plot.log, "svg", plot.log_bits, plot.width)


def stamp_of(folder: Path) -> Stamp:
    """Time and size of the files of a run that are read; None for those that are missing."""
    stamps: list[tuple[int, int] | None] = []
    for name in _FILES:
        try:
            status = os.stat(folder / name)
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_mtime_ns, status.st_size))
    return tuple(stamps)


def choose(
    found: dict[str, Watched], names: Sequence[str], known: Sequence[str] | None
) -> list[str]:
    """The runs to show: those of the visitor's choice that are there, and new ones that train.

    Args:
        names: of the runs chosen so far.
        known: the runs that there were at the last look; None for the first, when those that train
            are chosen, and the best of the others.
    """
    running = [name for name, each in found.items() if each.run.state == "running"]
    if known is None:
        return [*running, *(name for name in found if name not in running)][:FIRST_CURVES]
    return [name for name in names if name in found] + [
        name for name in running if name not in known and name not in names
    ]


def newest_grids(folder: Path) -> dict[str, tuple[int, Path]]:
    """The newest pictures that a run has drawn, by their kind, and the steps done by then."""
    newest: dict[str, tuple[int, Path]] = {}
    try:
        names = sorted(os.listdir(folder / "samples"))
    except OSError:
        return {}
    for name in names:
        if match := _GRID.fullmatch(name):
            step = int(match[1])
            if step >= newest.get(match[2], (0, folder))[0]:
                newest[match[2]] = (step, folder / "samples" / name)
    return newest
