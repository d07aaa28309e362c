"""A process of its own for each thing that is measured.

Its memory is then its own from the start, and one that dies takes nothing with it. PyTorch is
imported once, in a server without threads from which the workers are forked where the system can
do that. The allocator is the user's, with the user's settings.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

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
        peak_bytes: peak memory above that of the prepared process; None if it cannot be measured.
        parts: what the job itself returned, such as the seconds of its parts.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int | None
    parts: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As it is written to JSON."""
        return {name: value for name, value in asdict(self).items() if value != ()}


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

    from imagegen.core.machine import prepare

    # As every command computes, unless PyTorch's own variable says otherwise.
    prepare(tf32=os.environ.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1")
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


_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@runtime_checkable
class Meter(Protocol):
    """Measures the peak since `reset`, in bytes above what was held when the meter was made."""

    name: str

    def reset(self) -> None:
        """Forget the peak so far."""
        ...

    def peak(self) -> int:
        """The peak since the last reset."""
        ...


class ResidentMemory:
    """Resident memory of the process: Linux resets its high-water mark on request (proc(5))."""

    name = "VmHWM of /proc/self/status, reset by writing 5 to /proc/self/clear_refs"

    def __init__(self) -> None:
        self.reset()
        self._baseline = _high_water_mark()

    def reset(self) -> None:
        _CLEAR.write_text("5", encoding="ascii")

    def peak(self) -> int:
        return _high_water_mark() - self._baseline


class MaximalMemory:
    """Resident memory of the process where the mark only rises: only its first work is measured."""

    name = "ru_maxrss of getrusage"

    def __init__(self) -> None:
        self._baseline = self._maximum()

    def reset(self) -> None:
        pass

    def peak(self) -> int:
        return self._maximum() - self._baseline

    @staticmethod
    def _maximum() -> int:
        import resource

        # Bytes on macOS, KiB elsewhere.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class DeviceMemory:
    """Memory of tensors on a CUDA device."""

    name = "torch.cuda.max_memory_allocated"

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cuda = torch.cuda
        self._device = device
        self.reset()
        self._baseline = self._cuda.memory_allocated(device)

    def reset(self) -> None:
        self._cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return self._cuda.max_memory_allocated(self._device) - self._baseline


def meter_for(device: torch.device) -> Meter | None:
    """A meter for work on `device`; None where the system has none (Windows)."""
    if device.type == "cuda":
        return DeviceMemory(device)
    try:
        return ResidentMemory()
    except OSError:  # No Linux, or one whose /proc is not to be written.
        pass
    try:
        return MaximalMemory()
    except ImportError:
        return None


def _high_water_mark() -> int:
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no VmHWM")
