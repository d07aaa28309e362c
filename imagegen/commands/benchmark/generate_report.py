"""The result of `generate` in tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from imagegen.commands.benchmark.common import ratio
from imagegen.commands.benchmark.tables import digits, not_measured, ranged, rows, where


class Published(NamedTuple):
    """What Katharopoulos et al. (2020) report for a model that is measured here.

    Tables 1 and 2: images/s on a GPU, at batch sizes that differ; table 4: the same with the
    stateful softmax of the supplement; table 5: seconds per image at batch size 1.

    Attributes:
        name: as the paper has it.
        ours: the contestant that it is compared with; None without one.
        images_per_second: tables 1, 2 and 4.
        cpu, gpu: seconds per image at batch size 1, table 5.
    """

    name: str
    ours: str | None
    images_per_second: float
    cpu: float
    gpu: float


PUBLISHED = {
    "mnist": (
        Published("softmax", "softmax_recomputed", 0.45, 72.6, 10.2),
        Published("stateful-softmax", "softmax", 7.56, 7.4, 10.4),
        Published("LSH-1", None, 0.68, 46.0, 19.2),
        Published("LSH-4", None, 0.27, 112.0, 55.8),
        Published("linear", "linear", 142.8, 5.5, 7.3),
    ),
    "cifar10": (
        Published("softmax", "softmax_recomputed", 0.004, 8651.0, 300.0),
        Published("stateful-softmax", "softmax", 0.32, 71.9, 70.4),
        Published("LSH-1", None, 0.015, 2319.0, 222.0),
        Published("LSH-4", None, 0.005, 5264.0, 684.0),
        Published("linear", "linear", 17.85, 45.1, 61.3),
    ),
}

DIFFERENCES = {
    "images/s": "theirs on a GPU, each row at a batch size of its own; ours on the machine named "
    "above, at its best batch size. Theirs is PyTorch code, float32 by default; our weights are "
    "16-bit whole numbers where the processor has instructions for them (`precision=auto`).",
    "seconds per image, CPU": "one image at a time on either side, on different CPUs.",
    "seconds per image, GPU": "one image at a time on either side, on different GPUs.",
}
"""What differs, a line for each kind of number."""


def markdown(result: Mapping[str, Any]) -> str:
    """Speed, latency, memory and shares of the machine, with what one needs to read them."""
    contestants = result["contestants"]
    ceilings, batches = result["ceilings"], result["plan"]["lengths"]
    last = result["costs"]["length"]
    lines = [
        "# Generation",
        "",
        f"{result['sentence']}; {last:,} steps per image, random weights; {where(result)}",
        "",
        f"Median of up to {result['plan']['repeats']} repeats after one that warms up, contestants "
        "in turn (least to most in brackets). Each repeat times at most "
        f"{result['steps']} steps from positions {_listed(result['positions'])} on, with states "
        "and caches as full as they are there; between these a step's time is taken to be linear in"
        " its position. Setting up a batch is left out.",
        "",
        "## Images a second",
        "",
        *_by_batch(contestants, batches, "images_per_second"),
        "",
        "## Milliseconds per step",
        "",
        "The mean over an image; all images of a batch make the step together.",
        "",
        *_by_batch(contestants, batches, "ms_a_step"),
        "",
        "## At its best",
        "",
        *_best(contestants, batches[0]),
        "",
        "× against the first row: of the best images/s, the widest range that the repeats allow. "
        f"Peak memory: at that batch size, above the process with its weights; "
        f"{result['memory_meter']}. State: float32, behind the last step. Shares: of the "
        "operations and the bytes that the equations ask for, none twice, weights and states read "
        f"in float32 at each step, against {ceilings['flops'] / 1e9:,.0f} GFLOP/s (product of two "
        f"float32 matrices of {ceilings['matrix']:,}²) and {ceilings['bytes'] / 1e9:,.1f} GB/s "
        f"(copy of {ceilings['copied_bytes'] / 2**20:,.0f} MiB, both directions), both measured in "
        "this run. A share above 100 % means that caches hold what is read, or that weights are "
        "narrower than float32.",
        "",
        "## Milliseconds per step by position",
        "",
        *_by_position(contestants, result["positions"]),
    ]
    if result["paper"]:
        lines += ["", *_published(contestants, result["paper"], bool(result["machine"]["gpu"]))]
    lines += not_measured(
        (one["title"], batch["batch_size"], batch["not_measured"])
        for one in contestants
        for batch in one["batches"]
    )
    return "\n".join(lines) + "\n"


def at_batch(contestant: Mapping[str, Any], batch_size: int | None) -> Mapping[str, Any] | None:
    """What was measured of it at a batch size; None where nothing was."""
    for batch in contestant["batches"]:
        if batch["batch_size"] == batch_size and batch["images_per_second"]:
            found: Mapping[str, Any] = batch
            return found
    return None


def best_rate(contestant: Mapping[str, Any]) -> dict[str, float] | None:
    """Images/s at its best batch size."""
    best = at_batch(contestant, contestant["best_batch_size"])
    return None if best is None else best["images_per_second"]


def _by_batch(
    contestants: Sequence[Mapping[str, Any]], batch_sizes: Sequence[int], key: str
) -> list[str]:
    table = [["images at a time", *(f"{batch:,}" for batch in batch_sizes)]]
    for one in contestants:
        cells = [ranged(batch.get(key)) for batch in one["batches"]]
        table.append([one["title"], *cells])
    return rows(table)


def _best(contestants: Sequence[Mapping[str, Any]], smallest: int) -> list[str]:
    first = best_rate(contestants[0])
    table = [
        [
            "",
            f"seconds per image, batch {smallest:,}",
            "best images/s",
            "batch",
            "×",
            "state, KiB an image",
            "peak, MiB",
            "of arithmetic",
            "of memory",
        ]
    ]
    for one in contestants:
        alone, best = at_batch(one, smallest), at_batch(one, one["best_batch_size"])
        if best is None:
            table.append([one["title"], *["–"] * 4, digits(one["state_bytes"] / 2**10), *["–"] * 3])
            continue
        rate, peak = best["images_per_second"], best["peak_bytes"]
        table.append(
            [
                one["title"],
                ranged(alone and alone["seconds_for_batch"]),
                ranged(rate),
                f"{best['batch_size']:,}",
                _times(rate, first),
                digits(one["state_bytes"] / 2**10),
                "–" if peak is None else digits(peak / 2**20),
                f"{100 * best['share_of_arithmetic']:.1f} %",
                f"{100 * best['share_of_memory']:.1f} %",
            ]
        )
    return rows(table)


def _times(rate: Mapping[str, float], first: Mapping[str, float] | None) -> str:
    if first is None:
        return "–"
    return "1" if rate is first else ranged(ratio(rate, first))


def _by_position(contestants: Sequence[Mapping[str, Any]], positions: Sequence[int]) -> list[str]:
    head = ["", "batch", *(f"{position:,}" for position in positions), "last / first"]
    table = [head]
    for one in contestants:
        sizes = {one["batches"][0]["batch_size"], one["best_batch_size"]} - {None}
        for batch_size in sorted(sizes):
            batch = at_batch(one, batch_size)
            if batch is None:
                continue
            at = batch["ms_a_step_at"]
            cells = [ranged(each) for each in at]
            table.append(
                [one["title"], f"{batch_size:,}", *cells, "×" + ranged(ratio(at[-1], at[0]))]
            )
    return rows(table)


def _published(contestants: Sequence[Mapping[str, Any]], images: str, on_gpu: bool) -> list[str]:
    found = {one["name"]: one for one in contestants}
    kinds = list(DIFFERENCES)
    table = [["", *(f"{kind}: {whose}" for kind in kinds for whose in ("paper", "here"))]]
    for row in PUBLISHED[images]:
        one = found.get(row.ours or "", {"batches": [], "best_batch_size": None})
        alone = at_batch(one, 1)
        latency = ranged(alone and alone["seconds_for_batch"])
        table.append(
            [
                row.name,
                f"{row.images_per_second:g}",
                ranged(best_rate(one)),
                f"{row.cpu:g}",
                "–" if on_gpu else latency,
                f"{row.gpu:g}",
                latency if on_gpu else "–",
            ]
        )
    return [
        "## Beside the paper",
        "",
        "Katharopoulos et al. (2020), tables 1, 2, 4 and 5, for the model of these sizes:",
        "",
        *rows(table),
        "",
        *(f"- {kind}: {what}" for kind, what in DIFFERENCES.items()),
    ]


def _listed(values: Sequence[int]) -> str:
    texts = [f"{value:,}" for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
