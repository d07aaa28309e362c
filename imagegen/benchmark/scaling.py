"""`python -m imagegen.benchmark scaling`: a training step against the length of the sequence."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from imagegen import options as opt
from imagegen.benchmark.common import ascending
from imagegen.benchmark.mechanisms import Mechanism, check, choose
from imagegen.cli import hydra_entry
from imagegen.errors import UserError
from imagegen.output import staged_folder, write_atomic

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

_GUESS = 1500
"""Bytes that a step takes for each position and feature of the width: no mechanism took more."""

OWNED = ("scaling.json", "scaling.md", "scaling.png")


@dataclass(frozen=True)
class ScalingOptions:
    """What to measure and where to write, as `conf/benchmark_scaling.yaml` says."""

    mechanisms: list[Mechanism]
    lengths: tuple[int, ...]
    d_model: int
    n_heads: int
    batch_size: int
    repeats: int
    budget: float
    time_limit: float
    threads: int | None
    device: str
    seed: int
    out: Path

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ScalingOptions:
        """Check the plain values of `conf/benchmark_scaling.yaml`.

        Raises:
            UserError: naming the first option that cannot be.
        """
        return cls(
            mechanisms=choose(config["mechanisms"]),
            lengths=ascending(config["lengths"], "lengths", "[1024,2048]"),
            **{
                name: opt.whole_number(config[name], name, 1)
                for name in ("d_model", "n_heads", "batch_size", "repeats")
            },
            budget=opt.positive_number(config["budget"], "budget"),
            time_limit=opt.positive_number(config["time_limit"], "time_limit"),
            threads=opt.optional_whole_number(config["threads"], "threads", 1),
            device=str(config["device"]),
            seed=opt.whole_number(config["seed"], "seed", 0, opt.MAX_SEED),
            out=opt.out_folder(config["out"], "outputs/scaling"),
        )


def run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Do what `conf/benchmark_scaling.yaml` and the command line ask; print where the result is.

    Returns:
        what is written to `scaling.json`.

    Raises:
        UserError: for anything that cannot be; then nothing is written.
    """
    from imagegen.benchmark.plot import plot
    from imagegen.benchmark.report import markdown
    from imagegen.benchmark.training_step import N_LAYERS, row_length

    options = ScalingOptions.from_config(opt.plain(config))
    device = opt.resolve_device(options.device)
    for mechanism in options.mechanisms:
        check(
            mechanism,
            N_LAYERS,
            d_model=options.d_model,
            n_heads=options.n_heads,
            row_length=row_length(options.lengths[0]),
        )
    with staged_folder(options.out, owned=OWNED) as folder:
        result = measured(options, device)
        write_atomic(folder / "scaling.json", json.dumps(result, indent=2) + "\n")
        write_atomic(folder / "scaling.md", markdown(result))
        picture = plot(result)
        if picture is not None:
            write_atomic(folder / "scaling.png", picture)
    print(
        f"{len(options.mechanisms)} mechanisms at {len(options.lengths)} lengths "
        f"in {result['seconds']:.0f} s: {options.out}"
    )
    print(f"look at {options.out / 'scaling.md'}")
    if picture is None:
        print("no plot was drawn, for that takes matplotlib: pip install -e '.[plot]'")
    return result


def measured(options: ScalingOptions, device: torch.device) -> dict[str, Any]:
    """Measure everything in processes of their own.

    Returns:
        the content of `scaling.json`.

    Raises:
        UserError: where not a single step could be made.
    """
    import torch

    from imagegen.benchmark.machine import machine
    from imagegen.benchmark.measure import Plan, measure
    from imagegen.benchmark.memory import meter_for
    from imagegen.benchmark.report import tabled
    from imagegen.benchmark.training_step import FEED_FORWARD, N_LAYERS, TrainingStep
    from imagegen.benchmark.worker import Worker
    from imagegen.provenance import commit, versions

    # Before the work, whose load would be in it.
    described = machine(device)
    configs = {mechanism.name: mechanism.config for mechanism in options.mechanisms}
    threads = options.threads or torch.get_num_threads()
    plan = Plan(
        options.lengths,
        options.repeats,
        options.budget,
        options.time_limit,
        # Half of the memory, for expectations may be too low. A GPU is not shared with other
        # programs, so that nothing is gained by taking turns.
        memory_bytes=(described["memory_bytes"] or 0) // 2 if device.type == "cpu" else 0,
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
                seed=options.seed,
                threads=threads,
                device=str(device),
            )
        )

    started = perf_counter()
    points = measure(list(configs), plan, start, lambda line: print(line, file=sys.stderr))
    seconds = perf_counter() - started
    if not any(point.steps for each in points.values() for point in each):
        reasons = sorted({str(each[0].reason) for each in points.values()})
        raise UserError(f"nothing could be measured: {'; '.join(reasons)}.")
    meter = meter_for(device)
    return {
        "benchmark": "scaling",
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "seconds": seconds,
        "machine": described,
        "device": str(device),
        "threads": threads,
        "model": {
            "n_layers": N_LAYERS,
            "d_model": options.d_model,
            "n_heads": options.n_heads,
            "d_ff": FEED_FORWARD * options.d_model,
            "batch_size": options.batch_size,
            "dtype": "float32",
            "seed": options.seed,
        },
        "plan": {**asdict(plan), "lengths": list(plan.lengths)},
        "memory_meter": meter.name if meter else None,
        "mechanisms": [
            {"name": name, "attention": configs[name], **tabled(each)}
            for name, each in points.items()
        ],
        **versions(),
        "commit": commit(),
    }


@hydra_entry("benchmark_scaling")
def main(config: DictConfig) -> None:
    """Command-line entry."""
    run(config)
