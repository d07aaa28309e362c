"""The result of `train` in tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from imagegen.commands.benchmark.common import ratio
from imagegen.commands.benchmark.tables import digits, not_measured, ranged, rows, where


def markdown(result: Mapping[str, Any]) -> str:
    """Seconds, images a second, memory and ratios, with what one needs to read them."""
    contestants = result["contestants"]
    batch_sizes = result["plan"]["lengths"]
    optimizer = str(result["optimizer"]["_target_"]).rpartition(".")[2]

    def table(cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
        head = ["images a step", *(f"{size:,}" for size in batch_sizes)]
        return rows([head, *([one["title"], *map(cell, one["batches"])] for one in contestants)])

    lines = [
        "# A training step",
        "",
        f"{result['sentence']}; {result['length']:,} positions, random images; {where(result)}",
        "",
        "Forward and backward pass, gradients clipped to a norm of "
        f"{result['gradient_clip_val']:g}, {optimizer}. Median of up to "
        f"{result['plan']['repeats']} steps after one that warms up, contestants in turn (least to "
        "most in brackets).",
        "",
        "## Seconds a step",
        "",
        *table(lambda batch: ranged(batch["seconds_a_step"])),
        "",
        "## Images a second",
        "",
        *table(lambda batch: ranged(batch["images_per_second"])),
        "",
        "## How many times as long as the first row",
        "",
        "The widest range that the repeats allow in brackets.",
        "",
        *table(lambda batch: _times(batch, contestants[0]["batches"])),
        "",
        "## Peak memory, MiB",
        "",
        "Above the process with its weights, gradients and optimizer; a process for each number; "
        f"{result['memory_meter']}.",
        "",
        *table(lambda batch: _mebibytes(batch["peak_bytes"])),
    ]
    lines += not_measured(
        (one["title"], batch["batch_size"], batch["not_measured"])
        for one in contestants
        for batch in one["batches"]
    )
    return "\n".join(lines) + "\n"


def _times(batch: Mapping[str, Any], first: Sequence[Mapping[str, Any]]) -> str:
    (base,) = (one for one in first if one["batch_size"] == batch["batch_size"])
    if not (batch["seconds_a_step"] and base["seconds_a_step"]):
        return "–"
    if batch is base:
        return "1"
    return "×" + ranged(ratio(batch["seconds_a_step"], base["seconds_a_step"]))


def _mebibytes(size: int | None) -> str:
    return "–" if size is None else digits(size / 2**20)
