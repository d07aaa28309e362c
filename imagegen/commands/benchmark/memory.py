"""How much memory a piece of work takes at its height, beyond what the process held before."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

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
