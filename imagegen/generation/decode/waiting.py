"""Operations for which a program waits for its device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Waits(RuntimeError):
    """An operation that waits for the device."""


class Waiting(TorchDispatchMode):
    """Calls `found` with the name of each operation that waits for the device, before it runs.

    Those are operations whose result the host needs, for a number (`tensor.item()`) or for the size
    of a tensor (`tensor.nonzero()`, a mask as an index), and copies from one kind of device to
    another. A tensor on the CPU counts as one on a device, so that the CPU can play a GPU. Not all
    of them are found in inference mode, where operations that consist of others come whole.

    Args:
        found: may raise.
    """

    def __init__(self, found: Callable[[str], None]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            self.found(str(func))
        return func(*args, **kwargs)


def _waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func in _INDEXING:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if func is _aten.copy_.default:
        return bool(args[0].device.type != args[1].device.type)
    if func is _aten._to_copy.default:
        target = kwargs.get("device")
        return target is not None and torch.device(target).type != args[0].device.type
    return any(tag in func.tags for tag in _READS)


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Let operations that wait for the device raise.

    On a CUDA device its own check is switched on as well, which sees the operations inside of an
    operation too.

    Raises:
        Waits: at the first of them, except for what only CUDA's own check finds, which raises
            another RuntimeError.
    """

    def refuse(operation: str) -> None:
        raise Waits(f"{operation} waits for the device")

    with Waiting(refuse):
        if device.type != "cuda":
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            # That it does not find everything.
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
