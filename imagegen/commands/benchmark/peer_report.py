"""The result of `peer` in a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from imagegen.commands.benchmark.contestants import PEER
from imagegen.commands.benchmark.tables import digits, not_measured, ranged, rows, where


def markdown(result: Mapping[str, Any]) -> str:
    """Ratios with what was asked, and why some are missing."""
    drawn, trained = result["generate"], result["train"]
    table = [["", "ours", PEER, "ratio", "asked", "met"]]
    for row in result["ratios"]:
        asked = "–" if row["asked"] is None else f"≥ ×{digits(row['asked'])}"
        met = {True: "yes", False: "no", None: "–"}[row["met"]]
        numbers = [ranged(row["ours"]), ranged(row["theirs"])]
        times = "–" if row["ratio"] is None else "×" + ranged(row["ratio"])
        table.append([row["what"], *numbers, times, asked, met])
    lines = [
        f"# Beside {PEER}",
        "",
        f"{drawn['sentence']}; {drawn['costs']['length']:,} steps an image; {where(drawn)}",
        "",
        "Ours: linear attention, drawn as sample.py draws and trained as train.py trains. Theirs: "
        "recurrent linear attention, and causal-linear attention for training, at the same sizes. "
        "In turn in one run; medians, in brackets from the least to the most; of a ratio the "
        "widest range that the repeats allow. What was asked holds for the paper's models on two "
        "CPU cores; a ratio meets it by its median.",
        "",
        *rows(table),
    ]
    lines += not_measured(
        (one["title"], batch["batch_size"], batch["not_measured"])
        for one in (*drawn["contestants"], *trained["contestants"])
        for batch in one["batches"]
    )
    return "\n".join(lines) + "\n"
