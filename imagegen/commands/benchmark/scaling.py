"""`imagegen benchmark scaling`: a training step against the length of the sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from imagegen.cli.entry import hydra_entry
from imagegen.commands.benchmark.common import Common, ascending, heading, measured_points, publish
from imagegen.commands.benchmark.mechanisms import Mechanism, check, choose
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
            mechanisms=choose(config["mechanisms"]),
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
    from imagegen.commands.benchmark.report import markdown
    from imagegen.commands.benchmark.training_step import N_LAYERS, row_length

    options = ScalingOptions.from_config(opt.plain(config))
    device = opt.resolve_device(options.common.device)
    for mechanism in options.mechanisms:
        check(
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
    from imagegen.commands.benchmark.report import tabled
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
        # Half of the memory, for expectations may be too low. A GPU is not shared with other
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
        "plan": {**asdict(plan), "lengths": list(plan.lengths)},
        "mechanisms": [
            {"name": name, "attention": configs[name], **tabled(each)}
            for name, each in points.items()
        ],
    }


@hydra_entry("benchmark_scaling")
def main(config: DictConfig) -> None:
    """Command-line entry."""
    run(config)
