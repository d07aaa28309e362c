"""A device that this machine lacks, simulated: code that would fail on it fails here.

Tensors of the device compute on the CPU, with real numbers, but to Python they are on the device:
their `device` says so, and what PyTorch refuses there is refused here. That is

- an operation on tensors of the device and of the CPU together (a single number may be on the CPU,
  and so may the indices of a tensor of the device);
- `.numpy()` of a tensor of the device;
- float64 where the device has none, as Apple's MPS;
- an operation that has no kernel for MPS in the table that comes with PyTorch, or had none in the
  oldest version that is supported;
- reads back to the host, where a test forbids them: on a GPU they wait for it.

PyTorch's FakeTensorMode does not do for this: backward passes on fake CUDA tensors fail in a build
for CUDA without a GPU, there are no fake MPS tensors in a build for Linux, and without numbers,
half of what draws images could not run. What the simulation cannot show: kernels that are there but
wrong, or lack a type; rounding of the device's own; the speed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,
    aten.bincount.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
}
"""Operations whose result, or its shape, has to reach the host before it can go on."""
LATE = {"aten::embedding_bag", "aten::_embedding_bag", "aten::_embedding_bag_backward"}
"""Operations that MPS lacks in PyTorch 2.9, of those that models have used (found in its table)."""

INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}

MOVES = {Tensor.cpu: "cpu", Tensor.cuda: "cuda"}
METADATA = {
    Tensor.shape.__get__,
    Tensor.dtype.__get__,
    Tensor.ndim.__get__,
    Tensor.size,
    Tensor.dim,
}
MAY_MIX = {Tensor.copy_, Tensor.__setitem__, Tensor.data.__set__, Tensor.expand_as, Tensor.view_as}
"""What takes tensors of two devices on a real one as well."""


class OnDevice(Tensor):
    """A tensor of the simulated device; its numbers are in `numbers`, on the CPU.

    To PyTorch's C++ code it is a tensor of the CPU, for which alone every build has all that
    autograd needs; `Simulation` is what makes it one of the device.
    """

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> OnDevice:
        simulation = Simulation.current
        assert simulation is not None, "outside of its simulation"
        if not simulation.float64 and numbers.dtype in (torch.float64, torch.complex128):
            raise TypeError(
                f"Cannot convert a {simulation.kind} tensor to {numbers.dtype}: it has no such type"
            )
        made = Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            layout=numbers.layout,
            device="cpu",
        )
        made.numbers = numbers
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if Simulation.current is not None:
            Simulation.current.watch(func, args)
        plain_args, plain_kwargs = _mapped(_numbers, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if not _aliases(func):
            return _mapped(OnDevice, result)
        # Views, in inference mode too, are of the kind of what they are a view of.
        with torch.inference_mode(args[0].is_inference()):
            result = _mapped(OnDevice, result)
        return return_and_correct_aliasing(func, args, kwargs, result)


def _mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """`function` of every tensor in tuples, lists and dictionaries (PyTorch's own is slow)."""
    if isinstance(tree, Tensor):
        return function(tree)
    if type(tree) in (tuple, list):
        return type(tree)([_mapped(function, each) for each in tree])
    if type(tree) is dict:
        return {key: _mapped(function, each) for key, each in tree.items()}
    return tree


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.numbers if isinstance(tensor, OnDevice) else tensor


@functools.cache
def has_kernel(func: Any, key: str) -> bool:
    """Whether PyTorch's table of operations has a kernel for `key`, such as MPS, or for all."""
    if func._schema.name.startswith("aten::_scaled_dot_product_flash_attention_for_cpu"):
        return True  # Chosen among several by the device, which C++ code takes for the CPU.
    if key == "MPS" and func._schema.name in LATE:
        return False
    name = func._schema.name.removeprefix("aten::")
    entry = _table().get(f"{name}.{func._schema.overload_name}".removesuffix("."))
    if entry is not None and "structured_delegate" in entry:
        entry = _table()[entry["structured_delegate"]]
    if entry is None or "dispatch" not in entry:
        return True
    keys = {each.strip() for keys in entry["dispatch"] for each in keys.split(",")}
    return key in keys or any(each.startswith("Composite") for each in keys)


@functools.cache
def _table() -> dict[str, Any]:
    """The operations of native_functions.yaml by name."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries = yaml.load(path.read_text(encoding="utf-8"), loader)
    return {entry["func"].partition("(")[0]: entry for entry in entries}


@functools.cache
def _aliases(func: Any) -> bool:
    """Whether it returns a view, or what it was given."""
    return any(returned.alias_info is not None for returned in func._schema.returns)


class _Move(torch.autograd.Function):
    """Copies between the CPU and the device."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.numbers.clone() if isinstance(tensor, OnDevice) else OnDevice(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Move.forward(ctx, gradient)


class Simulation(TorchFunctionMode):
    """While it is entered, `kind` names a device.

    Args:
        kind: "cuda" or "mps".
        float64: whether the device has it.
    """

    current: Simulation | None = None

    def __init__(self, kind: str, float64: bool) -> None:
        super().__init__()
        self.kind = kind
        self.float64 = float64
        self.device = torch.device(kind, 0)
        self.reads_allowed = True
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Simulation:
        Simulation.current = self
        self._patches.enter_context(_autocast_on_cpu(self.kind))
        if self.kind == "cuda":
            patch = self._patches.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0 if self.reads_allowed else 2)
            patch.setattr(torch.cuda, "set_sync_debug_mode", self._set_sync_debug_mode)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        Simulation.current = None

    def _set_sync_debug_mode(self, mode: int | str) -> None:
        self.reads_allowed = mode not in (2, "error")

    @contextlib.contextmanager
    def without_reads(self) -> Iterator[None]:
        """Nothing may be read back to the host meanwhile."""
        self.reads_allowed = False
        try:
            yield
        finally:
            self.reads_allowed = True

    def watch(self, func: Any, args: tuple[Any, ...]) -> None:
        """Refuse operations that the device lacks, and reads that are forbidden."""
        if self.kind == "mps" and not has_kernel(func, "MPS"):
            raise NotImplementedError(f"{func} is not implemented for the MPS device")
        by_mask = func in INDEXING and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if not self.reads_allowed and (func in READS or by_mask):
            raise RuntimeError(f"{func} reads back to the host")

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in METADATA:
            return func(*args)
        kwargs = dict(kwargs or {})
        own = args[0] if args and isinstance(args[0], OnDevice) else None
        if own is not None:
            special = self._attribute(func, own, args)
            if special is not NotImplemented:
                return special
        if func is torch._has_compatible_shallow_copy_type:
            return own is not None and isinstance(args[1], OnDevice)
        if func is Tensor.to or func in MOVES:
            return self._moved(func, args, kwargs)
        if kwargs.get("device") is not None:
            # A factory, or a copy of something.
            device = torch.device(kwargs.pop("device"))
            return self._placed(func(*args, **kwargs), device)
        self._refuse_mixtures(func, args, kwargs)
        return func(*args, **kwargs)

    def _attribute(self, func: Any, own: OnDevice, args: tuple[Any, ...]) -> Any:
        """What the device is asked about one of its tensors; NotImplemented for anything else."""
        if func == Tensor.device.__get__:
            return self.device
        for name in ("is_cpu", "is_cuda", "is_mps"):
            if func == getattr(Tensor, name).__get__:
                return name == f"is_{self.kind}"
        if func in (Tensor.numpy, Tensor.__array__):
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first."
            )
        if func is Tensor.tolist:
            self.watch(aten._local_scalar_dense.default, args)
            return own.numbers.tolist()
        if func in (Tensor.__reduce_ex__, Tensor.__reduce__):
            return func(own.numbers.detach(), *args[1:])
        if func is Tensor.__deepcopy__:
            copy: Tensor = OnDevice(own.numbers.detach().clone())
            if isinstance(own, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, own.requires_grad)
            args[1][id(own)] = copy
            return copy
        if func == Tensor.data.__set__:
            assert isinstance(args[1], OnDevice)
            own.numbers = args[1].numbers
        return NotImplemented

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        tensor, *rest = args
        if func in MOVES:
            return self._placed(tensor, torch.device(MOVES[func]))
        copy = kwargs.pop("copy", False)
        if rest and isinstance(rest[0], Tensor):
            rest = [self._device_of(rest[0]), rest[0].dtype]
        device, dtype, _, _ = torch._C._nn._parse_to(*rest, **kwargs)
        device = device or self._device_of(tensor)
        if dtype is None or dtype == tensor.dtype:
            moved = self._placed(tensor, device)
        elif device.type == self.kind and not isinstance(tensor, OnDevice):
            moved = self._placed(tensor.to(dtype), device)
        else:
            # Types are converted on the device that the tensor comes from.
            moved = self._placed(Tensor.to(tensor, dtype), device)
        return moved.clone() if copy and moved is tensor else moved

    def _placed(self, result: Any, device: torch.device) -> Any:
        target = device.type == self.kind
        return _mapped(lambda t: t if isinstance(t, OnDevice) == target else _Move.apply(t), result)

    def _device_of(self, tensor: Tensor) -> torch.device:
        return self.device if isinstance(tensor, OnDevice) else tensor.device

    def _refuse_mixtures(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors: list[Tensor] = []
        _mapped(tensors.append, (args, kwargs))
        on_device = [isinstance(tensor, OnDevice) for tensor in tensors]
        if not any(on_device) or all(on_device) or func in MAY_MIX:
            return
        if func is Tensor.__getitem__:
            # A single number is read back to become an index of a tensor on the CPU.
            on_device = [on and t.ndim > 0 for t, on in zip(tensors, on_device, strict=True)]
            if on_device[0] or not any(on_device):
                return
        if any(t.ndim for t, on in zip(tensors, on_device, strict=True) if not on):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{self.device} and cpu, in {getattr(func, '__name__', func)}"
            )


@contextlib.contextmanager
def _autocast_on_cpu(kind: str) -> Iterator[None]:
    """Autocast for the device acts on tensors of the CPU, as its tensors are to C++ code."""
    init = torch.autocast.__init__

    @functools.wraps(init)
    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if device_type == kind else device_type, *args, **kwargs)

    torch.autocast.__init__ = on_cpu  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = init  # type: ignore[method-assign]


def cuda() -> Simulation:
    """An NVIDIA GPU."""
    return Simulation("cuda", float64=True)


def mps() -> Simulation:
    """The GPU of a Mac."""
    return Simulation("mps", float64=False)


DEVICES: dict[str, Callable[[], Simulation]] = {"cuda": cuda, "mps": mps}
