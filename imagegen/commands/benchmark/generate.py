"""`imagegen benchmark generate`: images per second, latency and memory of generation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from imagegen.cli.entry import hydra_entry
from imagegen.commands.benchmark.common import (
    Bench,
    Common,
    ascending,
    known_bytes,
    measured_points,
    publish,
    spread,
    too_much,
)
from imagegen.commands.benchmark.contestants import DRAWERS, Drawer, choose_contestants
from imagegen.commands.benchmark.setting import FLOAT, Costs, Setting
from imagegen.core import values as opt
from imagegen.core.errors import UserError

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

    from imagegen.commands.benchmark.measure import Point

MATRIX, COPIED = 2048, 2**28
"""Rows of the matrices and bytes of the copy from which the machine's ceilings are taken."""


@dataclass(frozen=True)
class GenerateOptions:
    """What to measure and where to write, as `conf/benchmark_generate.yaml` says."""

    contestants: dict[str, Drawer]
    setting: Setting
    costs: Costs
    positions: tuple[int, ...]
    steps: int
    piece: float
    batch_sizes: tuple[int, ...]
    common: Common

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "generate") -> GenerateOptions:
        """Check the plain values of the configuration; builds the model once.

        Raises:
            UserError: naming the first option that cannot be.
        """
        contestants = choose_contestants(config["contestants"], DRAWERS)
        common = Common.from_config(config, f"outputs/benchmark-{name}")
        batch_sizes = ascending(config["batch_sizes"], "batch_sizes", "[1,16]")
        steps = opt.whole_number(config["steps"], "steps", 1)
        piece = opt.positive_number(config["piece"], "piece")
        setting = Setting.from_config(config, common.seed)
        costs = Costs.of(setting.build("linear"))
        positions = positions_of(config["positions"], steps, costs.length)
        return cls(contestants, setting, costs, positions, steps, piece, batch_sizes, common)


def run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Do what `conf/benchmark_generate.yaml` and the command line ask; print where the result is.

    Returns:
        what is written to `generate.json`.

    Raises:
        UserError: for anything that cannot be; then nothing is written.
    """
    from imagegen.commands.benchmark.generate_report import markdown
    from imagegen.commands.benchmark.plot import plot_generation

    options = GenerateOptions.from_config(opt.plain(config))
    device = opt.resolve_device(options.common.device)
    return publish(
        "generate",
        options.common.out,
        lambda: measured(options, device),
        markdown,
        f"{len(options.contestants)} contestants",
        plot_generation,
    )


def measured(options: GenerateOptions, device: torch.device) -> dict[str, Any]:
    """Measure everything in processes of their own.

    Returns:
        the content of `generate.json`.

    Raises:
        UserError: where nothing could be measured.
    """
    from imagegen.commands.benchmark.generation_step import GenerationStep
    from imagegen.commands.benchmark.worker import Worker

    common, costs = options.common, options.costs
    bench = Bench.of(
        "generate",
        common,
        options.batch_sizes,
        device,
        guess_bytes=3 * max(costs.state_bytes(name) for name in ("linear", "softmax")),
        unit="images at a time",
        work="the job",
    )
    started = perf_counter()
    ceilings = ceilings_of(bench.threads, str(device), common.repeats)

    def start(name: str, batch_size: int) -> Worker:
        return Worker(
            GenerationStep(
                options.contestants[name],
                options.setting,
                batch_size,
                options.positions,
                options.steps,
                options.piece,
                bench.threads,
                str(device),
            )
        )

    def refuse(name: str, batch_size: int, points: Sequence[Point]) -> str | None:
        expected = _expected_seconds(points, batch_size, options)
        size = _expected_bytes(options.contestants[name], batch_size, options)
        size = max(size, known_bytes(points, batch_size) or 0)
        return too_much(expected, common.time_limit, size, bench.room)

    points = measured_points(list(options.contestants), bench.plan, start, refuse)
    return {
        **bench.head,
        "seconds": perf_counter() - started,
        "model": options.setting.describe(),
        "sentence": options.setting.sentence(),
        "paper": options.setting.paper,
        "costs": asdict(costs),
        "ceilings": ceilings,
        "positions": list(options.positions),
        "steps": options.steps,
        "piece": options.piece,
        "plan": bench.plan.to_dict(),
        "contestants": [
            entry(name, options, points[name], ceilings) for name in options.contestants
        ],
    }


def entry(
    name: str, options: GenerateOptions, points: Sequence[Point], ceilings: Mapping[str, float]
) -> dict[str, Any]:
    """What the result says of one contestant."""
    drawer, costs = options.contestants[name], options.costs
    batches = [_batch(drawer, options, point, ceilings) for point in points]
    done = [batch for batch in batches if batch["images_per_second"]]
    best = max(done, key=lambda batch: float(batch["images_per_second"]["median"]), default=None)
    kept = 0 if drawer.form == "recomputed" else costs.state_bytes(drawer.attention)
    return {
        "name": name,
        **asdict(drawer),
        "state_bytes": kept,
        "best_batch_size": best and best["batch_size"],
        "batches": batches,
    }


def _batch(
    drawer: Drawer, options: GenerateOptions, point: Point, ceilings: Mapping[str, float]
) -> dict[str, Any]:
    costs, batch = options.costs, point.length
    result: dict[str, Any] = {
        "batch_size": batch,
        "images_per_second": None,
        "repeats": [step.to_dict() for step in point.steps],
        "not_measured": point.reason,
    }
    if not point.steps:
        return result
    together = [
        seconds_together(options.positions, step.parts, options.steps, costs.length)
        for step in point.steps
    ]
    rate = batch / statistics.median(together)
    flops = costs.flops_an_image(drawer.attention)
    moved = costs.bytes_an_image(drawer.attention, batch)
    return {
        **result,
        "images_per_second": spread([batch / seconds for seconds in together]),
        "seconds_for_batch": spread(together),
        "ms_a_step": spread([1e3 * seconds / costs.length for seconds in together]),
        "ms_a_step_at": [
            spread([1e3 * step.parts[index] for step in point.steps])
            for index in range(len(options.positions))
        ],
        "peak_bytes": point.peak_bytes,
        "share_of_arithmetic": rate * flops / ceilings["flops"],
        "share_of_memory": rate * moved / ceilings["bytes"],
    }


def ceilings_of(threads: int, device: str, repeats: int) -> dict[str, float]:
    """The best of some products and copies: float32 operations and bytes moved, a second each."""
    from imagegen.commands.benchmark.generation_step import Ceilings
    from imagegen.commands.benchmark.worker import Worker

    worker = Worker(Ceilings(MATRIX, COPIED, threads, device))
    try:
        worker.ready()
        steps = [worker.step().parts for _ in range(repeats + 2)]
    finally:
        worker.close()
    return {
        "matrix": MATRIX,
        "copied_bytes": COPIED,
        "flops": 2 * MATRIX**3 / min(product for product, _ in steps),
        # A copy reads and writes.
        "bytes": 2 * COPIED / min(copy for _, copy in steps),
    }


def _expected_seconds(
    points: Sequence[Point], batch_size: int, options: GenerateOptions
) -> float | None:
    """Of a whole job, if a step takes longer as the batch grows; None where nothing is known."""
    known = [point for point in points if point.steps]
    if not known:
        return None
    growth = batch_size / known[-1].length
    steps = [growth * seconds for seconds in known[-1].steps[-1].parts]
    return sum(min(options.steps * step, options.piece + step) for step in steps)


def _expected_bytes(drawer: Drawer, batch_size: int, options: GenerateOptions) -> float:
    costs, model = options.costs, options.setting.model
    if drawer.form == "recomputed":
        wide = 2 * model["d_ff"] + 10 * model["d_model"]
        return FLOAT * batch_size * costs.length * wide
    # The compiled loop has copies of its own; all others have one layer twice for a moment.
    copies = 3 if drawer.form == "compiled" else 2
    return copies * batch_size * costs.state_bytes(drawer.attention)


def positions_of(value: object, steps: int, length: int) -> tuple[int, ...]:
    """First steps of the timed pieces, ascending: numbers, `middle` and `last`.

    Raises:
        UserError: for other words, and for pieces that an image has no room for.
    """
    last = length - 1 - steps
    if last < 0:
        raise UserError(f"steps={steps}, but an image has {length}; choose at most {length - 1}.")
    words = {"last": last, "middle": last // 2}
    values = opt.as_list(value)
    found = set()
    for one in [value] if values is None else values:
        number = words.get(str(one), one)
        if isinstance(number, str):
            raise UserError(f"positions holds {one}; it takes numbers, middle and last.")
        found.add(opt.whole_number(number, "positions", 0, last))
    if not found:
        raise UserError("positions is an empty list; such as positions=[10,middle,last].")
    return tuple(sorted(found))


def seconds_together(
    positions: Sequence[int], seconds: Sequence[float], steps: int, length: int
) -> float:
    """Seconds for all steps of a batch, from those of a step at a few positions.

    Between the middles of the pieces a step's time is taken to be linear in its position (the
    trapezoid rule), before the first and behind the last to be constant.

    Args:
        positions: first steps of the pieces, ascending.
        seconds: of a step of each piece.
        steps: of a piece.
        length: of an image.
    """
    import numpy as np

    middles = np.array(positions) + (steps + 1) / 2
    return float(np.interp(np.arange(length), middles, np.array(seconds)).sum())


@hydra_entry("benchmark_generate")
def main(config: DictConfig) -> None:
    """Command-line entry."""
    run(config)
