"""CUDA played by the CPU: streams, graphs and devices that note what is done with them.

A graph keeps the operations of its capture and replays them in the memory that they used, as CUDA
does. The tensors on the CPU play those of device 1, while device 0 is current when a test begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from imagegen.generation.decode.waiting import Waiting

MODEL_DEVICE = 1
needs_fake_cuda = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.10") and not torch.cuda.is_available(),
    reason="PyTorch 2.9 needs a driver even where fake CUDA tensors are indexed",
)


class _Tape(TorchDispatchMode):
    """Keeps operations, with the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.done:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@dataclass
class FakeStream:
    """A stream of a device."""

    cuda: FakeCuda
    device: int
    name: str

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.note(f"{self.name} waits for {other.name}", self.device)


class FakeGraph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.tape = _Tape()
        cuda.note("graph")

    def replay(self) -> None:
        self.cuda.note("replay")
        assert self.cuda.stream.name == "default", "replayed on a side stream"
        self.tape.replay()


class FakeCuda:
    """What of `torch.cuda` a recording uses.

    Attributes:
        events: what was done, in order.
        current: the current device.
        stream: the current stream.
        fails: raised in the middle of a capture.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.current = 0
        self.defaults = [FakeStream(self, index, "default") for index in (0, MODEL_DEVICE)]
        self.stream = self.defaults[0]
        self.capturing = False
        self.fails: Callable[[], None] | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        """Put this in the place of `torch.cuda`."""
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "Stream", lambda device: self._new_stream(device))
        monkeypatch.setattr(cuda, "CUDAGraph", lambda: FakeGraph(self))
        monkeypatch.setattr(cuda, "graph", self._graph)
        monkeypatch.setattr(cuda, "stream", self._stream)
        monkeypatch.setattr(cuda, "set_stream", self._set_stream)
        monkeypatch.setattr(cuda, "current_stream", self._current_stream)
        monkeypatch.setattr(cuda, "synchronize", lambda device: self.note("synchronize", device))
        monkeypatch.setattr(cuda, "device", self._device)
        return self

    def note(self, event: str, device: object = None) -> None:
        """Remember an event; everything has to happen on the model's device."""
        assert self.current == MODEL_DEVICE, f"{event} on device {self.current}"
        assert device is None or self._index(device) == MODEL_DEVICE, f"{event} of another device"
        self.events.append(event)

    @staticmethod
    def _index(device: object) -> int:
        return device if isinstance(device, int) else MODEL_DEVICE

    def _new_stream(self, device: object) -> FakeStream:
        self.note("stream", device)
        return FakeStream(self, self._index(device), "side")

    def _current_stream(self, device: object) -> FakeStream:
        return self.stream if self.stream.device == self._index(device) else self.defaults[1]

    def _set_stream(self, stream: FakeStream) -> None:
        self.stream, self.current = stream, stream.device

    @contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        before = self.current, self.stream
        self.current, self.stream = self._index(device), self.defaults[self._index(device)]
        try:
            yield
        finally:
            self.current, self.stream = before

    @contextmanager
    def _stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.stream
        self.note(f"on {stream.name}", stream.device)
        self._set_stream(stream)
        try:
            yield
        finally:
            self._set_stream(before)

    @contextmanager
    def _graph(
        self, graph: FakeGraph, stream: FakeStream, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """As PyTorch's: the stream of a capture that fails stays current."""
        assert capture_error_mode == "thread_local"
        before = self.stream
        self.note("capture", stream.device)
        self._set_stream(stream)
        failed = False

        def fail(operation: str) -> None:
            nonlocal failed
            failed = True
            raise RuntimeError(f"CUDA error: {operation} not permitted when stream is capturing")

        self.capturing = True
        try:
            with graph.tape, Waiting(fail):
                if self.fails is not None:
                    self.fails()
                yield
        finally:
            self.capturing = False
            if failed:
                raise RuntimeError(
                    "CUDA error: operation failed due to a previous error during capture\nmore"
                )
        self._set_stream(before)


def shortened(events: Sequence[str]) -> list[str]:
    """The events, those that follow their like counted: "replay x 3"."""
    result: list[tuple[str, int]] = []
    for event in events:
        if result and result[-1][0] == event:
            result[-1] = event, result[-1][1] + 1
        else:
            result.append((event, 1))
    return [event if count == 1 else f"{event} x {count}" for event, count in result]


def sync_debug_modes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The modes that CUDA's own check of waiting has been set to; the last is the current one."""
    modes: list[object] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def to_fake_cuda(model: nn.Module) -> None:
    """Put a model on a CUDA device that is not there; under a `FakeTensorMode`."""
    for module in model.modules():
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None:
                moved = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                setattr(module, name, nn.Parameter(moved) if name in module._parameters else moved)
