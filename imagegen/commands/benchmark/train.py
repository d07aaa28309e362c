"""`imagegen benchmark train`: time and memory of a training step of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    ratio,
    spread,
    too_much,
)
from imagegen.commands.benchmark.contestants import TRAINERS, Trainer, choose_contestants
from imagegen.commands.benchmark.setting import FLOAT, Costs, Setting
from imagegen.commands.benchmark.tables import digits, not_measured, ranged, rows, where
from imagegen.core import values as opt
from imagegen.core.errors import UserError

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

    from imagegen.commands.benchmark.measure import Point

_GUESS = 2**28
"""Bytes that an image is expected to take where nothing is known yet."""


@dataclass(frozen=True)
class TrainOptions:
    """What to measure and where to write, as `conf/benchmark_train.yaml` says."""

    contestants: dict[str, Trainer]
    setting: Setting
    costs: Costs
    optimizer: dict[str, Any]
    batch_sizes: tuple[int, ...]
    common: Common

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "train") -> TrainOptions:
        """Check the plain values of the configuration; builds the model and its optimizer once.

        Raises:
            UserError: naming the first option that cannot be.
        """
        from hydra.utils import instantiate

        from imagegen.training.optimizers import build_optimizer

        contestants = choose_contestants(config["contestants"], TRAINERS)
        common = Common.from_config(config, f"outputs/benchmark-{name}")
        batch_sizes = ascending(config["batch_sizes"], "batch_sizes", "[1,16]")
        setting = Setting.from_config(config, common.seed)
        model = setting.build("linear")
        optimizer = dict(config["optimizer"])
        try:
            build_optimizer(instantiate(optimizer), model)
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer is refused: {error}.") from error
        return cls(contestants, setting, Costs.of(model), optimizer, batch_sizes, common)


def run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Do what `conf/benchmark_train.yaml` and the command line ask; print where the result is.

    Returns:
        what is written to `train.json`.

    Raises:
        UserError: for anything that cannot be; then nothing is written.
    """
    options = TrainOptions.from_config(opt.plain(config))
    device = opt.resolve_device(options.common.device)
    return publish(
        "train",
        options.common.out,
        lambda: measured(options, device),
        markdown,
        f"{len(options.contestants)} contestants",
    )


def measured(options: TrainOptions, device: torch.device) -> dict[str, Any]:
    """Measure everything in processes of their own.

    Returns:
        the content of `train.json`.

    Raises:
        UserError: where nothing could be measured.
    """
    from imagegen.commands.benchmark.training_step import CLIP, ModelStep
    from imagegen.commands.benchmark.worker import Worker
    from imagegen.core.machine import has_bf16

    common = options.common
    bench = Bench.of(
        "train",
        common,
        options.batch_sizes,
        device,
        guess_bytes=_GUESS,
        unit="images per step",
    )
    bf16 = has_bf16(device)

    def start(name: str, batch_size: int) -> Worker:
        return Worker(
            ModelStep(
                options.contestants[name],
                options.setting,
                options.optimizer,
                batch_size,
                bench.threads,
                str(device),
            )
        )

    def refuse(name: str, batch_size: int, points: Sequence[Point]) -> str | None:
        if options.contestants[name].bf16 and not bf16:
            return "skipped, because this processor has no instructions for bfloat16"
        known = [(point.seconds, point.length) for point in points if point.seconds is not None]
        expected = known[-1][0] * batch_size / known[-1][1] if known else None
        size = known_bytes(points, batch_size)
        if size is None:
            size = batch_size * expected_bytes(options.contestants[name], options)
        return too_much(expected, common.time_limit, size, bench.room)

    started = perf_counter()
    points = measured_points(list(options.contestants), bench.plan, start, refuse)
    return {
        **bench.head,
        "seconds": perf_counter() - started,
        "model": options.setting.describe(),
        "sentence": options.setting.sentence(),
        "paper": options.setting.paper,
        "length": options.costs.length,
        "optimizer": options.optimizer,
        "gradient_clip_val": CLIP,
        "plan": bench.plan.to_dict(),
        "contestants": [
            {"name": name, **asdict(trainer), "batches": [_batch(each) for each in points[name]]}
            for name, trainer in options.contestants.items()
        ],
    }


def _batch(point: Point) -> dict[str, Any]:
    seconds = [step.seconds for step in point.steps]
    return {
        "batch_size": point.length,
        "seconds_a_step": spread(seconds) if seconds else None,
        "images_per_second": spread([point.length / each for each in seconds]) if seconds else None,
        "peak_bytes": point.peak_bytes,
        "repeats": [step.to_dict() for step in point.steps],
        "not_measured": point.reason,
    }


def expected_bytes(trainer: Trainer, options: TrainOptions) -> float:
    """A rough guess at what is kept of one image for the backward pass."""
    costs, model = options.costs, options.setting.model
    a_position = costs.layers * (24 * model["d_model"] + 4 * model["d_ff"]) + 500
    # The peer keeps the matrix of all pairs of positions a few times.
    pairs = costs.layers * costs.heads * costs.length if trainer.peer else 0
    return (
        FLOAT * costs.length * (a_position + (4 * pairs if trainer.attention == "softmax" else 0))
    )


def markdown(result: Mapping[str, Any]) -> str:
    """Seconds, images per second, memory and ratios, with what one needs to read them."""
    contestants = result["contestants"]
    batch_sizes = result["plan"]["lengths"]
    optimizer = str(result["optimizer"]["_target_"]).rpartition(".")[2]

    def table(cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
        head = ["images per step", *(f"{size:,}" for size in batch_sizes)]
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


@hydra_entry("benchmark_train")
def main(config: DictConfig) -> None:
    """Command-line entry."""
    run(config)
