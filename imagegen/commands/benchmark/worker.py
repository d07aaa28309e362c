"""A process of its own for each thing that is measured.

Its memory is then its own from the start, and one that dies takes nothing with it. PyTorch is
imported once, in a server without threads from which the workers are forked where the system can
do that. The allocator is the user's, with the user's settings.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

from imagegen.commands.benchmark.memory import Meter, meter_for

_REST = 0.01
"""Seconds after which the threads of a process that has done its work no longer spin."""


@runtime_checkable
class Job(Protocol):
    """What a worker does; it is sent there, so it holds plain values only."""

    @property
    def threads(self) -> int:
        """Number of PyTorch's threads."""
        ...

    @property
    def device(self) -> str:
        """The device that is worked on."""
        ...

    def prepare(self) -> Callable[[], Sequence[float] | None]:
        """Build everything in the worker; returns what is to be measured.

        That may return numbers of its own: `Measured.parts`.
        """
        ...


@dataclass(frozen=True)
class Measured:
    """One go.

    Attributes:
        seconds: on the clock.
        cpu_seconds: of all threads of the process; far fewer than seconds * threads where other
            programs take the cores.
        peak_bytes: peak memory above that of the prepared process; None where there is no meter.
        parts: what the job itself returned, such as the seconds of its parts.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int | None
    parts: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Failure:
    reason: str


class WorkerFailed(Exception):
    """A job could not be done; the message says why, without a full stop."""


class Worker:
    """A process that prepares `job` at once and then measures it whenever it is asked to."""

    def __init__(self, job: Job) -> None:
        context = _context()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, job), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it is prepared; to be called once, first.

        Raises:
            WorkerFailed: if it cannot be.
        """
        self._answer()

    def step(self) -> Measured:
        """Do the job once.

        Raises:
            WorkerFailed: if it cannot be done.
        """
        with contextlib.suppress(OSError):  # A worker that has died says so in its answer.
            self._connection.send("step")
        measured: Measured = self._answer()
        return measured

    def close(self) -> None:
        """End the process, whatever it does."""
        self._connection.close()
        self._process.kill()
        self._process.join()

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise WorkerFailed(_ending(self._process.exitcode)) from None
        if isinstance(answer, _Failure):
            raise WorkerFailed(answer.reason)
        return answer


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Not imagegen: the server may find another one than this process did.
    context.set_forkserver_preload(["torch"])
    return context


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        memory = ", as happens where memory runs out" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{memory}"
    return f"its process ended with status {exitcode}"


def _serve(connection: Connection, job: Job) -> None:
    # Ctrl-C reaches all processes of a terminal; the first one tells and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        go, meter = _prepared(job)
        connection.send("ready")
        while True:
            connection.recv()
            measured = _measured(go, meter, job.device)
            time.sleep(_REST)
            connection.send(measured)
    except EOFError:
        return
    except Exception as error:
        from imagegen.cli.entry import debugging
        from imagegen.cli.messages import sentence_for

        if debugging():
            raise
        first = (str(error).splitlines() or [""])[0]
        reason = sentence_for(error) or f"{type(error).__name__}: {first}"
        connection.send(_Failure(reason.rstrip(".")))


def _prepared(job: Job) -> tuple[Callable[[], Sequence[float] | None], Meter | None]:
    import torch

    torch.set_num_threads(job.threads)
    go = job.prepare()
    return go, meter_for(torch.device(job.device))


def _measured(
    go: Callable[[], Sequence[float] | None], meter: Meter | None, device: str
) -> Measured:
    import torch

    def finish() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    if meter is not None:
        meter.reset()
    finish()
    started, cpu_started = time.perf_counter(), time.process_time()
    parts = go()
    finish()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    peak = meter.peak() if meter else None
    return Measured(seconds, cpu_seconds, peak, tuple(parts or ()))
