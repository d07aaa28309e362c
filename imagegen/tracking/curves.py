"""Learning curves of runs, from their metrics.csv: `imagegen runs … plot=FILE.png`.

A run that is training is read as far as it has come. Axes: `n` point.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from jaxtyping import Float64

from imagegen.core.errors import UserError
from imagegen.core.installation import pip_install
from imagegen.tracking.metrics_rows import read_rows
from imagegen.tracking.run_options import differences, images_per_step
from imagegen.tracking.runs_table import Run, find_runs

AGAINST = {"steps": "steps", "images": "images seen", "seconds": "seconds of training"}
"""What a curve can be drawn against, and how its axis is called."""

KINDS = ("png", "svg", "pdf")
"""Endings of files that a plot can be written to."""

_WIDTH = 120
_LABEL_LINES = 3


@dataclass(frozen=True)
class Points:
    """bits/dim during a run.

    Attributes:
        steps: optimizer steps done.
        images: seen until then, by all processes; NaN where their number is not known.
        seconds: of training alone, validations and pauses left out; NaN likewise.
        bits_per_dim: then.
    """

    steps: Float64[np.ndarray, " n"]
    images: Float64[np.ndarray, " n"]
    seconds: Float64[np.ndarray, " n"]
    bits_per_dim: Float64[np.ndarray, " n"]

    def smoothed(self) -> Points:
        """The mean of each point and those around it, to both sides a twentieth of those before.

        So the noise of the later points goes and the fall of the first ones stays.
        """
        index = np.arange(len(self.steps))
        half = index // 20
        first, end = index - half, np.minimum(index + half + 1, len(index))
        sums = np.concatenate([[0.0], np.cumsum(self.bits_per_dim)])
        return replace(self, bits_per_dim=(sums[end] - sums[first]) / (end - first))


@dataclass(frozen=True)
class Curve:
    """A run and how it learns.

    Attributes:
        run: whose curve it is.
        train: of the batches, a point for each row of the log; not smoothed.
        val: of the validations.
    """

    run: Run
    train: Points
    val: Points

    def known(self, against: str) -> bool:
        """Whether there is anything to draw against one of `AGAINST`."""
        return any(np.isfinite(getattr(each, against)).any() for each in (self.train, self.val))


def curves(folders: Iterable[Path]) -> list[Curve]:
    """The curves of all runs in and below the folders; without points where none are logged yet.

    Raises:
        UserError: for a folder that does not exist.
    """
    return [read_curve(run) for run in find_runs(folders)]


def read_curve(run: Run) -> Curve:
    """The curve of a run; without points where its metrics are missing or damaged."""
    try:
        rows = read_rows(run.folder / "metrics.csv")
    except (OSError, ValueError, csv.Error):
        rows = []
    per_step = images_per_step(run.folder)
    return Curve(run, *(points_of(rows, f"{name}/bits_per_dim", per_step) for name in _SPLITS))


_SPLITS = ("train", "val")


def points_of(rows: Sequence[Mapping[str, str]], name: str, images_per_step: float) -> Points:
    """The points of one column of a metrics file.

    Seconds are those that the logged images/s imply. They are known at the rows that log it, and in
    proportion to the steps between.

    Args:
        rows: of the file.
        name: of the column.
        images_per_step: of all processes together; NaN if not known.
    """
    steps, values, rates = (
        np.array([_number(row.get(column)) for row in rows], dtype=np.float64)
        for column in ("step", name, "train/images_per_second")
    )
    steps += 1  # rows count from 0
    timed = np.isfinite(steps) & (rates > 0)
    at = np.concatenate([[0.0], steps[timed]])
    seconds = np.concatenate([[0.0], np.cumsum(np.diff(at) * images_per_step / rates[timed])])
    found = np.isfinite(steps) & np.isfinite(values)
    steps, values = steps[found], values[found]
    clock = np.interp(steps, at, seconds) if timed.any() else np.full(len(steps), np.nan)
    return Points(steps, steps * images_per_step, clock, values)


def plot_curves(
    found: Mapping[str, Curve],
    against: str = "steps",
    log: bool = False,
    kind: str = "png",
    log_bits: bool = False,
    width: float = 10.0,
) -> bytes:
    """Curves over each other: lines of training, smoothed, and points of validations.

    Args:
        found: by the names of their runs in the legend, where the options follow in which they
            differ; each `known` against what is drawn.
        against: one of `AGAINST`.
        log: whether that axis is logarithmic.
        kind: one of `KINDS`.
        log_bits: whether the axis of bits/dim is logarithmic.
        width: of the picture, in inches.

    Returns:
        The bytes of the file.

    Raises:
        UserError: where matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    labels = _labels(found, round(_WIDTH * width / 10))
    height = 5.5 + 0.2 * sum(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    axes = figure.subplots()
    colours = colormaps["tab10" if len(found) <= 10 else "tab20"].colors  # type: ignore[attr-defined]
    lines: list[Any] = []
    seen: list[float] = []
    for index, (curve, label) in enumerate(zip(found.values(), labels, strict=True)):
        style = {"color": colours[index % len(colours)], "label": label}
        train, val = curve.train.smoothed(), curve.val
        lines += axes.plot(getattr(train, against), train.bits_per_dim, linewidth=1.2, **style)
        axes.plot(getattr(val, against), val.bits_per_dim, "o", markersize=4, **style)
        # The fall of the first steps would leave no room for the rest.
        seen += [*train.bits_per_dim[1:], *val.bits_per_dim]
    frame(axes, AGAINST[against], seen)
    if log:
        axes.set_xscale("log")
    if log_bits:
        axes.set_yscale("log")
        # The range is short: without these the axis would hardly have a number.
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
    axes.set_ylabel("bits/dim")
    title = "lines: training, smoothed; points: validation"
    figure.legend(handles=lines, loc="outside lower center", fontsize="small", title=title)
    data = io.BytesIO()
    figure.savefig(data, format=kind)
    return data.getvalue()


def frame(axes: Any, name: str, bits_per_dim: Sequence[float]) -> None:
    """Name the lower axis of matplotlib's axes, and limit the left one to these values, if any."""
    axes.set_xlabel(name)
    axes.grid(alpha=0.3)
    if bits_per_dim:
        axes.set_ylim(0.95 * min(bits_per_dim), 1.02 * max(bits_per_dim))


def check_matplotlib() -> None:
    """Refuse to draw where nothing can draw.

    Raises:
        UserError: where matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        how = pip_install("plot", "matplotlib")
        raise UserError(f"plot needs matplotlib, which is not installed: {how}.") from error


def _labels(found: Mapping[str, Curve], width: int) -> list[str]:
    different = differences([curve.run.folder for curve in found.values()])
    labels = []
    for index, (name, curve) in enumerate(found.items()):
        options = [f"{key}={values[index]}" for key, values in different.items() if values[index]]
        running = ["(running)"] if curve.run.state == "running" else []
        # Dollar signs would be read as formulas.
        label = " ".join([name, *options, *running]).replace("$", r"\$")
        labels.append(fill(label, width, max_lines=_LABEL_LINES, placeholder=" …"))
    return labels


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan
