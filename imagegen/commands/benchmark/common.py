"""What the sub-commands share: options, refusals of what would not fit, spreads, writing."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagegen.commands.benchmark.measure import Plan, Point, Runner, measure
from imagegen.core import values as opt
from imagegen.core.errors import UserError
from imagegen.core.files import staged_folder, write_atomic
from imagegen.core.installation import pip_install

if TYPE_CHECKING:
    import torch
else:  # Annotations are checked in tests; torch is not to be imported for them.
    torch = Any


@dataclass(frozen=True)
class Common:
    """How often and how long to measure, on what, and where to write.

    Attributes:
        repeats, budget, time_limit: see `Plan`.
        threads: PyTorch's choice for None.
    """

    repeats: int
    budget: float
    time_limit: float
    threads: int | None
    device: str
    seed: int
    out: Path

    @classmethod
    def from_config(cls, config: Mapping[str, Any], folder: str) -> Common:
        """Check the plain values of a `conf/benchmark_*.yaml`.

        Args:
            folder: where results go by default.

        Raises:
            UserError: naming the first option that cannot be.
        """
        if str(config["device"]).startswith("mps"):
            raise UserError("device=mps cannot be measured; use device=cpu or a CUDA device.")
        return cls(
            repeats=opt.whole_number(config["repeats"], "repeats", 1),
            budget=opt.positive_number(config["budget"], "budget"),
            time_limit=opt.positive_number(config["time_limit"], "time_limit"),
            threads=opt.optional_whole_number(config["threads"], "threads", 1),
            device=str(config["device"]),
            seed=opt.whole_number(config["seed"], "seed", 0, opt.MAX_SEED),
            out=opt.out_folder(config["out"], folder),
        )


def ascending(value: object, name: str, example: str) -> tuple[int, ...]:
    """One or more whole numbers of at least 1, in order, each once.

    Raises:
        UserError: for anything else.
    """
    values = opt.as_list(value)
    numbers = [opt.whole_number(v, name, 1) for v in ([value] if values is None else values)]
    if not numbers:
        raise UserError(f"{name} is an empty list; name at least one, such as {name}={example}.")
    return tuple(sorted(set(numbers)))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most of repeats."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratio(above: Mapping[str, float], below: Mapping[str, float]) -> dict[str, float]:
    """The ratio of two medians, and the widest range that the repeats allow."""
    return {
        "median": above["median"] / below["median"],
        "least": above["least"] / below["most"],
        "most": above["most"] / below["least"],
    }


def too_much(
    seconds: float | None, time_limit: float, size: float, room: float | None
) -> str | None:
    """Why something is not measured; None where it is.

    Args:
        seconds: that it is expected to take; None where nothing is known.
        size, room: bytes that it is expected to need, and that there are; None where unknown.
    """
    if room is not None and size > room:
        return (
            f"skipped, because it would need about {size / 2**30:.3g} GiB, more than half of the "
            f"memory ({room / 2**30:.3g} GiB)"
        )
    if seconds is not None and seconds > time_limit:
        return (
            f"skipped, because it would take about {seconds:.3g} s, "
            f"more than time_limit={time_limit:g}"
        )
    return None


def known_bytes(points: Sequence[Point], batch_size: int) -> float | None:
    """The peak of the largest batch measured so far, grown to another one; None without one."""
    peaks = [point.peak_bytes / point.length for point in points if point.peak_bytes]
    return batch_size * peaks[-1] if peaks else None


def half_of_memory(described: Mapping[str, Any], device: torch.device) -> int | None:
    """Bytes; of a GPU's memory where one is measured, None where it is unknown.

    Args:
        described: what `imagegen.core.machine.describe` returns.
    """
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // 2
    size: int | None = described["memory_bytes"]
    return None if size is None else size // 2


def load_average() -> list[float] | None:
    """Processes that ran or waited in the last 1, 5 and 15 minutes; None where it is unknown."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


def heading(name: str, device: torch.device, threads: int) -> dict[str, Any]:
    """The entries that every result starts with."""
    from imagegen.checkpoint.provenance import commit, versions
    from imagegen.commands.benchmark.worker import meter_for
    from imagegen.core.machine import describe

    meter = meter_for(device)
    return {
        "benchmark": name,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": {**describe(device), "load_average": load_average()},
        "device": str(device),
        "threads": threads,
        "memory_meter": meter.name if meter else None,
        **versions(),
        "commit": commit(),
    }


@dataclass(frozen=True)
class Bench:
    """A machine on which whole models are measured at several batch sizes.

    Attributes:
        head: entries that the result starts with, found before the work, whose load would be in
            them.
        threads: PyTorch's.
        room: bytes that a measurement may need, half of the memory; None where it is unknown.
        plan: how often and how long to measure.
    """

    head: dict[str, Any]
    threads: int
    room: int | None
    plan: Plan

    @classmethod
    def of(
        cls,
        name: str,
        common: Common,
        batch_sizes: tuple[int, ...],
        device: torch.device,
        **plan: Any,
    ) -> Bench:
        """Look at the machine.

        Args:
            name: of the sub-command.
            plan: more of `Plan`.
        """
        import torch

        threads = common.threads or torch.get_num_threads()
        head = heading(name, device, threads)
        room = half_of_memory(head["machine"], device)
        return cls(
            {**head, "seed": common.seed},
            threads,
            room,
            Plan(
                batch_sizes,
                common.repeats,
                common.budget,
                common.time_limit,
                memory_bytes=(room or 0) if device.type == "cpu" else 0,
                larger="larger batches",
                **plan,
            ),
        )


def measured_points(
    names: Sequence[str],
    plan: Plan,
    start: Callable[[str, int], Runner],
    refuse: Callable[[str, int, Sequence[Point]], str | None] | None = None,
) -> dict[str, list[Point]]:
    """`measure`, telling on stderr.

    Raises:
        UserError: where nothing at all could be measured, saying why.
    """
    points = measure(names, plan, start, lambda line: print(line, file=sys.stderr), refuse)
    if not any(point.steps for each in points.values() for point in each):
        reasons = sorted({str(each[0].reason) for each in points.values()})
        raise UserError(f"nothing could be measured: {'; '.join(reasons)}.")
    return points


def publish(
    name: str,
    out: Path,
    measured: Callable[[], dict[str, Any]],
    markdown: Callable[[Mapping[str, Any]], str],
    said: str,
    plot: Callable[[Mapping[str, Any]], bytes | None] | None = None,
) -> dict[str, Any]:
    """Measure, write `NAME.json`, `NAME.md` and, with `plot`, `NAME.png`; print where they are.

    Args:
        name: of the sub-command.
        out: the folder; an earlier result there is replaced.
        measured: makes the result.
        said: what has been measured, in words.

    Returns:
        The result.
    """
    picture = None
    files = [f"{name}.{kind}" for kind in ("json", "md", "png")[: 3 if plot else 2]]
    with staged_folder(out, owned=files) as folder:
        result = measured()
        write_atomic(folder / f"{name}.json", json.dumps(result, indent=2) + "\n")
        write_atomic(folder / f"{name}.md", markdown(result))
        picture = None if plot is None else plot(result)
        if picture is not None:
            write_atomic(folder / f"{name}.png", picture)
    print(f"{said} in {result['seconds']:.0f} s: {out}")
    print(f"look at {out / f'{name}.md'}")
    if plot is not None and picture is None:
        print(
            "no plot was drawn, because matplotlib is not installed: "
            f"{pip_install('plot', 'matplotlib')}"
        )
    return result
