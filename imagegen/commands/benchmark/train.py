"""`imagegen benchmark train`: time and memory of a training step of a whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from imagegen.cli.entry import hydra_entry
from imagegen.commands.benchmark.common import (
    Common,
    ascending,
    half_of_memory,
    heading,
    known_bytes,
    measured_points,
    publish,
    spread,
    too_much,
)
from imagegen.commands.benchmark.contestants import TRAINERS, Trainer, choose_contestants
from imagegen.commands.benchmark.setting import FLOAT, Costs, Setting
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
    from imagegen.commands.benchmark.train_report import markdown

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
    import torch

    from imagegen.commands.benchmark.measure import Plan
    from imagegen.commands.benchmark.model_step import CLIP, ModelStep
    from imagegen.commands.benchmark.worker import Worker
    from imagegen.core.machine import has_bf16

    common = options.common
    threads = common.threads or torch.get_num_threads()
    # Before the work, whose load would be in it.
    head = heading("train", device, threads)
    room, bf16 = half_of_memory(head["machine"], device), has_bf16(device)
    plan = Plan(
        options.batch_sizes,
        common.repeats,
        common.budget,
        common.time_limit,
        memory_bytes=(room or 0) if device.type == "cpu" else 0,
        guess_bytes=_GUESS,
        unit="images a step",
        larger="larger batches",
    )

    def start(name: str, batch_size: int) -> Worker:
        return Worker(
            ModelStep(
                options.contestants[name],
                options.setting,
                options.optimizer,
                batch_size,
                threads,
                str(device),
            )
        )

    def refuse(name: str, batch_size: int, points: Sequence[Point]) -> str | None:
        if options.contestants[name].bf16 and not bf16:
            return "skipped, for this processor has no instructions for bfloat16"
        known = [(point.seconds, point.length) for point in points if point.seconds is not None]
        expected = known[-1][0] * batch_size / known[-1][1] if known else None
        size = known_bytes(points, batch_size)
        if size is None:
            size = batch_size * expected_bytes(options.contestants[name], options)
        return too_much(expected, common.time_limit, size, room)

    started = perf_counter()
    points = measured_points(list(options.contestants), plan, start, refuse)
    return {
        **head,
        "seed": common.seed,
        "seconds": perf_counter() - started,
        "model": options.setting.describe(),
        "sentence": options.setting.sentence(),
        "paper": options.setting.paper,
        "length": options.costs.length,
        "optimizer": options.optimizer,
        "gradient_clip_val": CLIP,
        "plan": {**asdict(plan), "lengths": list(plan.lengths)},
        "contestants": [
            {"name": name, **asdict(trainer), "batches": [_batch(each) for each in points[name]]}
            for name, trainer in options.contestants.items()
        ],
    }


def _batch(point: Point) -> dict[str, Any]:
    from imagegen.commands.benchmark.report import plain_step

    seconds = [step.seconds for step in point.steps]
    return {
        "batch_size": point.length,
        "seconds_a_step": spread(seconds) if seconds else None,
        "images_per_second": spread([point.length / each for each in seconds]) if seconds else None,
        "peak_bytes": point.peak_bytes,
        "repeats": [plain_step(step) for step in point.steps],
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


@hydra_entry("benchmark_train")
def main(config: DictConfig) -> None:
    """Command-line entry."""
    run(config)
