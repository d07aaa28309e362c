"""Measure several things at several lengths, in turn, so that all see the same machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

from imagegen.commands.benchmark.worker import Measured, WorkerFailed


@runtime_checkable
class Runner(Protocol):
    """What `measure` needs of a `Worker`."""

    def ready(self) -> None:
        """Wait until it is prepared."""
        ...

    def step(self) -> Measured:
        """Do the work once."""
        ...

    def close(self) -> None:
        """End it."""
        ...


@dataclass(frozen=True)
class Plan:
    """How often and how long to measure.

    Attributes:
        lengths: ascending.
        repeats: measured steps at a length, after one that warms up.
        budget: seconds of steps after which none is repeated; a first step that takes longer is
            the measurement itself.
        time_limit: longer lengths are skipped once a step took more seconds.
        memory_bytes: all that is expected to fit in here together is measured in turn, for between
            its steps a process holds on to memory; 0: one after the other.
        guess_bytes: memory that a position is expected to take where nothing is known yet.
        unit, larger, work: what is told: that a length counts `unit`, that the `larger` ones are
            skipped, how long `work` took.
    """

    lengths: tuple[int, ...]
    repeats: int
    budget: float
    time_limit: float
    memory_bytes: int
    guess_bytes: int
    unit: str = "positions"
    larger: str = "longer lengths"
    work: str = "a step"

    def to_dict(self) -> dict[str, Any]:
        """As it is written to JSON."""
        return {**asdict(self), "lengths": list(self.lengths)}


@dataclass
class Point:
    """What was found at one length.

    Attributes:
        steps: the measured ones.
        warm_up: the step before them; None where it is the measurement itself.
        reason: why there are none, without a full stop.
    """

    length: int
    steps: list[Measured] = field(default_factory=list)
    warm_up: Measured | None = None
    reason: str | None = None

    @property
    def seconds(self) -> float | None:
        """Median of the steps."""
        return statistics.median(step.seconds for step in self.steps) if self.steps else None

    @property
    def peak_bytes(self) -> int | None:
        """Median of the peaks, that of the warm-up among them.

        A first step may find the allocator in better or worse order than later ones do.
        """
        steps = self.steps if self.warm_up is None else [self.warm_up, *self.steps]
        peaks = [step.peak_bytes for step in steps if step.peak_bytes is not None]
        return round(statistics.median(peaks)) if peaks else None


def measure(
    names: Sequence[str],
    plan: Plan,
    start: Callable[[str, int], Runner],
    tell: Callable[[str], None],
    refuse: Callable[[str, int, Sequence[Point]], str | None] | None = None,
) -> dict[str, list[Point]]:
    """Measure each of `names` at each length.

    Args:
        names: what is measured.
        plan: how often and how long.
        start: starts the work of a name at a length.
        tell: called with a line for each length and whenever something is not measured.
        refuse: says why a name is not to be measured at a length, given the points at shorter ones;
            None where it is.

    Returns:
        for each name a point for each length, measured or with the reason why not.
    """
    points: dict[str, list[Point]] = {name: [] for name in names}
    stopped: dict[str, str] = {}
    for length in plan.lengths:
        todo = [name for name in names if name not in stopped]
        for name in names:
            if name in stopped:
                points[name].append(Point(length, reason=stopped[name]))
        for name in list(todo):
            reason = None if refuse is None else refuse(name, length, points[name])
            if reason is not None:
                points[name].append(Point(length, reason=reason))
                todo.remove(name)
                tell(f"{name} at {length:,}: {reason}")
        for group in _groups(todo, length, points, plan):
            for name, point in _measure_length(group, length, plan, start).items():
                points[name].append(point)
                stop = _reason_to_stop(point, plan)
                if stop:
                    stopped[name] = stop
                    tell(f"{name}: {point.reason or stop}")
        if todo:
            tell(f"{length:,} {plan.unit}: {len(todo)} measured")
    return points


def _groups(
    names: Sequence[str], length: int, points: Mapping[str, Sequence[Point]], plan: Plan
) -> list[list[str]]:
    """Those that are measured in turn, each group after the one before."""
    groups: list[list[str]] = []
    room = 0.0
    for name in names:
        known = [(p.peak_bytes, p.length) for p in points[name] if p.peak_bytes]
        peak, at = known[-1] if known else (plan.guess_bytes, 1)
        expected = peak * length / at
        if not groups or expected > room:
            groups.append([])
            room = plan.memory_bytes
        groups[-1].append(name)
        room -= expected
    return groups


def _measure_length(
    names: Sequence[str], length: int, plan: Plan, start: Callable[[str, int], Runner]
) -> dict[str, Point]:
    points = {name: Point(length) for name in names}
    runners: dict[str, Runner] = {}
    try:
        # All are prepared side by side, and nothing is measured meanwhile.
        for name in names:
            runners[name] = start(name, length)
        for name in names:
            try:
                runners[name].ready()
            except WorkerFailed as error:
                points[name].reason = f"failed at {length:,}: {error}"
                runners.pop(name).close()
        for _ in range(plan.repeats + 1):
            for name in list(runners):
                if not _go(runners[name], points[name], plan):
                    runners.pop(name).close()
    finally:
        for runner in runners.values():
            runner.close()
    for point in points.values():
        if len(point.steps) > 1:
            point.warm_up = point.steps.pop(0)
    return points


def _go(runner: Runner, point: Point, plan: Plan) -> bool:
    """Make one step; returns whether there is to be another one."""
    try:
        point.steps.append(runner.step())
    except WorkerFailed as error:
        point.steps.clear()
        point.reason = f"failed at {point.length:,}: {error}"
        return False
    spent = sum(step.seconds for step in point.steps)
    return len(point.steps) <= plan.repeats and spent < plan.budget


def _reason_to_stop(point: Point, plan: Plan) -> str | None:
    if point.reason is not None:
        return f"skipped, because it {point.reason}"
    seconds = point.seconds
    if seconds is not None and seconds > plan.time_limit:
        return (
            f"{plan.larger} are skipped, because {plan.work} at {point.length:,} took "
            f"{seconds:.3g} s, more than time_limit={plan.time_limit:g}"
        )
    return None
