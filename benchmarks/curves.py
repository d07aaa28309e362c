"""Learning curves of a table, against seconds and against images seen; see `trainings.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from imagegen.tracking.curves import AGAINST, frame, points_of
from imagegen.tracking.metrics_rows import read_rows

# Points of the training loss, one every ten steps, that a point of a curve is the mean of.
WINDOW = 20


class Curve(NamedTuple):
    """Training bits/dim of a run, which no image had been seen for before in a first epoch."""

    row: str
    seed: int
    seconds: list[float]
    images: list[float]
    bits_per_dim: list[float]


def curve_of(metrics: Path, row: str, seed: int, speed: Mapping[str, float]) -> Curve:
    """The curve of a run, its time counted as `speed` measured it.

    Args:
        metrics: metrics.csv of the run folder.
        row, seed: name the run.
        speed: `seconds_a_step` and `batch_size` of the row.
    """
    train = points_of(read_rows(metrics), "train/bits_per_dim", speed["batch_size"])
    whole = len(train.steps) - len(train.steps) % WINDOW
    steps, images, bits = (
        each[:whole].reshape(-1, WINDOW).mean(axis=1)
        for each in (train.steps, train.images, train.bits_per_dim)
    )
    seconds = (steps * speed["seconds_a_step"]).round(2)
    return Curve(row, seed, seconds.tolist(), images.tolist(), bits.round(4).tolist())


def write_curves(curves: Sequence[Curve], path: Path) -> None:
    """Numbers to `path`.json, two plots side by side to `path`.png."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([curve._asdict() for curve in curves], indent=None)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    sides = figure.subplots(1, 2, sharey=True)
    colours = {row: f"C{i}" for i, row in enumerate(dict.fromkeys(c.row for c in curves))}
    for curve in curves:
        for side, x in zip(sides, (curve.seconds, curve.images), strict=True):
            label = curve.row if curve.seed == 0 else None
            side.plot(x, curve.bits_per_dim, color=colours[curve.row], label=label, linewidth=1)
    # The fall of the first steps would leave no room for the rest.
    seen = [bits for curve in curves for bits in curve.bits_per_dim[1:]]
    for side, name in zip(sides, ("seconds", "images"), strict=True):
        frame(side, AGAINST[name], seen)
    sides[0].set_ylabel("training bits/dim")
    lines = sides[0].get_legend_handles_labels()[0]
    figure.legend(handles=lines, loc="outside lower center", ncols=2)
    figure.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})
