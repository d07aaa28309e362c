"""The result of the scaling benchmark in numbers and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from imagegen.commands.benchmark.measure import Point
from imagegen.commands.benchmark.tables import digits, not_measured, rows, where
from imagegen.commands.benchmark.worker import Measured

DOUBLINGS = 3
"""Doublings of the length, the last ones, over which growth is taken."""


def growth(values: Sequence[tuple[int, float]]) -> float | None:
    """The factor by which a value grows when the length doubles; 2 where it is linear.

    It is the geometric mean over the last three doublings, or over as many as there are.

    Args:
        values: lengths, ascending, and the values there.

    Returns:
        None for fewer than two lengths, or values that are not positive.
    """
    if not values:
        return None
    last_length, last = values[-1]
    first_length, first = next(v for v in values if v[0] * 2**DOUBLINGS >= last_length)
    if first_length == last_length or first <= 0 or last <= 0:
        return None
    return (last / first) ** (1 / math.log2(last_length / first_length))


def tabled(points: Sequence[Point]) -> dict[str, Any]:
    """The points of one mechanism and their growth, as they are written to JSON."""
    measured = [point for point in points if point.steps]
    seconds = [(p.length, p.seconds) for p in measured if p.seconds is not None]
    memory = [(p.length, p.peak_bytes) for p in measured if p.peak_bytes is not None]
    return {
        "growth": {"seconds": growth(seconds), "peak_bytes": growth(memory)},
        "points": [
            {
                "length": point.length,
                "seconds": point.seconds,
                "peak_bytes": point.peak_bytes,
                "repeats": [plain_step(step) for step in point.steps],
                "warm_up": plain_step(point.warm_up) if point.warm_up else None,
                "not_measured": point.reason,
            }
            for point in points
        ],
    }


def plain_step(step: Measured) -> dict[str, Any]:
    """A step as it is written to JSON."""
    return {name: value for name, value in asdict(step).items() if value != ()}


def markdown(result: Mapping[str, Any]) -> str:
    """Two tables, time and memory, with what one needs to read them."""
    model = result["model"]
    lines = [
        "# A training step against the length of the sequence",
        "",
        f"{model['n_layers']} layers, d_model={model['d_model']}, n_heads={model['n_heads']}, "
        f"batch_size={model['batch_size']}, {model['dtype']}; {where(result)}",
        "",
        f"Median of up to {result['plan']['repeats']} steps after one that warms up, mechanisms "
        f"{_order(result['plan']['memory_bytes'])}; where the first "
        f"step took more than {result['plan']['budget']:g} s, that step itself. {_spread(result)}",
        "",
        "A doubling: the factor by which a doubling of the length multiplies, the geometric mean "
        f"over the last {DOUBLINGS} doublings measured. 2 is linear, 2.83 is n^1.5, 4 is n^2.",
        "",
        "## Milliseconds a step",
        "",
        *_table(result, "seconds", lambda seconds: digits(1e3 * seconds)),
        "",
        "## Peak memory, MiB above the prepared process",
        "",
        f"A fresh process for each number, the allocator as it comes; {result['memory_meter']}.",
        "",
        *_table(result, "peak_bytes", lambda size: digits(size / 2**20)),
    ]
    lines += not_measured(
        (each["name"], point["length"], point["not_measured"])
        for each in result["mechanisms"]
        for point in each["points"]
    )
    return "\n".join(lines) + "\n"


def _table(result: Mapping[str, Any], key: str, text: Callable[[float], str]) -> list[str]:
    head = ["mechanism", *(f"{length:,}" for length in result["plan"]["lengths"]), "a doubling"]
    table = [head]
    for each in result["mechanisms"]:
        values = [point[key] for point in each["points"]]
        factor = each["growth"][key]
        cells = ["–" if value is None else text(value) for value in values]
        table.append([each["name"], *cells, "–" if factor is None else f"×{factor:.2f}"])
    return rows(table)


def _order(memory_bytes: int) -> str:
    if not memory_bytes:
        return "one after the other"
    return f"in turn, as many together as fit into {memory_bytes / 2**30:.1f} GiB"


def _spread(result: Mapping[str, Any]) -> str:
    """How far apart repeats of one step are."""
    ratios = [
        (max(seconds) / min(seconds), each["name"], point["length"])
        for each in result["mechanisms"]
        for point in each["points"]
        if len(seconds := [step["seconds"] for step in point["repeats"]]) > 1
    ]
    if not ratios:
        return ""
    ratios.sort()
    middle, (worst, name, length) = ratios[len(ratios) // 2][0], ratios[-1]
    return (
        f"The slowest repeat took {100 * (middle - 1):.0f} % longer than the fastest at the median "
        f"point, {100 * (worst - 1):.0f} % at most ({name} at {length:,})."
    )
