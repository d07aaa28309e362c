"""Numbers, tables and lines that the results of several benchmarks are written with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def digits(value: float) -> str:
    """Three digits, or all before the point."""
    if value <= 0:
        return "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def ranged(values: Mapping[str, float] | None, text: Callable[[float], str] = digits) -> str:
    """A median with its spread."""
    if values is None:
        return "–"
    least, most = text(values["least"]), text(values["most"])
    middle = text(values["median"])
    return middle if least == most else f"{middle} ({least} – {most})"


def rows(table: Sequence[Sequence[str]]) -> list[str]:
    """A table whose first row is its head; the first column to the left, all others right."""
    head, *rest = table
    marks = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (head, marks, *rest)]


def where(result: Mapping[str, Any]) -> str:
    """The machine and the versions in a line, with a full stop."""
    machine = result["machine"]
    place = machine["gpu"] or f"{machine['processor']}, {result['threads']} threads"
    commit = f", commit {result['commit']}" if result.get("commit") else ""
    return (
        f"{place}; PyTorch {result['torch_version']}; "
        f"imagegen {result['imagegen_version']}{commit}."
    )


def not_measured(entries: Iterable[tuple[str, int, str | None]]) -> list[str]:
    """A list of what was not measured, after an empty line; nothing where all was.

    Args:
        entries: what, at which size, and why, None where it was.
    """
    missing = [f"- {what} at {size:,}: {reason}." for what, size, reason in entries if reason]
    return ["", "Not measured:", "", *missing] if missing else []
