"""`imagegen benchmark scaling`: a training step against the length of the sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from imagegen.cli.entry import hydra_entry
from imagegen.commands.benchmark.common import Common, ascending, heading, measured_points, publish
from imagegen.commands.benchmark.contestants import Mechanism, check_mechanism, choose_mechanisms
from imagegen.commands.benchmark.measure import Point
from imagegen.commands.benchmark.tables import digits, not_measured, rows, where
from imagegen.core import values as opt

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

_GUESS = 1500
"""Bytes that a step takes for each position and feature of the width: no mechanism took more."""


@dataclass(frozen=True)
class ScalingOptions:
    """What to measure and where to write, as `conf/benchmark_scaling.yaml` says."""

    mechanisms: list[Mechanism]
    lengths: tuple[int, ...]
    d_model: int
    n_heads: int
    batch_size: int
    common: Common

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ScalingOptions:
        """Check the plain values of `conf/benchmark_scaling.yaml`.

        Raises:
            UserError: naming the first option that cannot be.
        """
        return cls(
            mechanisms=choose_mechanisms(config["mechanisms"]),
            lengths=ascending(config["lengths"], "lengths", "[1024,2048]"),
            **{
                name: opt.whole_number(config[name], name, 1)
                for name in ("d_model", "n_heads", "batch_size")
            },
            common=Common.from_config(config, "outputs/scaling"),
        )


def run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Do what `conf/benchmark_scaling.yaml` and the command line ask; print where the result is.

    Returns:
        what is written to `scaling.json`.

    Raises:
        UserError: for anything that cannot be; then nothing is written.
    """
    from imagegen.commands.benchmark.plot import plot
    from imagegen.commands.benchmark.training_step import N_LAYERS, row_length

    options = ScalingOptions.from_config(opt.plain(config))
    device = opt.resolve_device(options.common.device)
    for mechanism in options.mechanisms:
        check_mechanism(
            mechanism,
            N_LAYERS,
            d_model=options.d_model,
            n_heads=options.n_heads,
            row_length=row_length(options.lengths[0]),
        )
    return publish(
        "scaling",
        options.common.out,
        lambda: measured(options, device),
        markdown,
        f"{len(options.mechanisms)} mechanisms at {len(options.lengths)} lengths",
        plot,
    )


def measured(options: ScalingOptions, device: torch.device) -> dict[str, Any]:
    """Measure everything in processes of their own.

    Returns:
        the content of `scaling.json`.

    Raises:
        UserError: where not a single step could be made.
    """
    import torch

    from imagegen.commands.benchmark.measure import Plan
    from imagegen.commands.benchmark.training_step import FEED_FORWARD, N_LAYERS, TrainingStep
    from imagegen.commands.benchmark.worker import Worker

    configs = {mechanism.name: mechanism.config for mechanism in options.mechanisms}
    common = options.common
    threads = common.threads or torch.get_num_threads()
    # Before the work, whose load would be in it.
    head = heading("scaling", device, threads)
    plan = Plan(
        options.lengths,
        common.repeats,
        common.budget,
        common.time_limit,
        # Half of the memory, because expectations may be too low. A GPU is not shared with other
        # programs, so that nothing is gained by taking turns.
        memory_bytes=(head["machine"]["memory_bytes"] or 0) // 2 if device.type == "cpu" else 0,
        guess_bytes=_GUESS * options.batch_size * options.d_model,
    )

    def start(name: str, length: int) -> Worker:
        return Worker(
            TrainingStep(
                attention=configs[name],
                length=length,
                d_model=options.d_model,
                n_heads=options.n_heads,
                batch_size=options.batch_size,
                seed=common.seed,
                threads=threads,
                device=str(device),
            )
        )

    started = perf_counter()
    points = measured_points(list(configs), plan, start)
    return {
        **head,
        "seconds": perf_counter() - started,
        "model": {
            "n_layers": N_LAYERS,
            "d_model": options.d_model,
            "n_heads": options.n_heads,
            "d_ff": FEED_FORWARD * options.d_model,
            "batch_size": options.batch_size,
            "dtype": "float32",
            "seed": common.seed,
        },
        "plan": plan.to_dict(),
        "mechanisms": [
            {"name": name, "attention": configs[name], **tabled(each)}
            for name, each in points.items()
        ],
    }


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
                "repeats": [step.to_dict() for step in point.steps],
                "warm_up": point.warm_up.to_dict() if point.warm_up else None,
                "not_measured": point.reason,
            }
            for point in points
        ],
    }


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
        "## Milliseconds per step",
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


@hydra_entry("benchmark_scaling")
def main(config: DictConfig) -> None:
    """Command-line entry."""
    run(config)
