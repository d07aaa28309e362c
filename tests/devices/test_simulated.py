"""The simulated device refuses what a real one does, and computes what the CPU does."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.devices.simulated import OnDevice, Simulation, cuda, mps


@pytest.fixture(params=[cuda, mps], ids=["cuda", "mps"])
def there(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    with request.param() as simulation:
        yield simulation


def test_tensors_are_where_they_say(there: Simulation) -> None:
    made = torch.arange(6, device=there.kind).float().view(2, 3)
    for tensor in (made, made[0], made.T + 1, torch.zeros_like(made), made.new_ones(2), made.sum()):
        assert isinstance(tensor, OnDevice)
        assert tensor.device == there.device
        assert tensor.is_cuda == (there.kind == "cuda")
    for tensor in (made.cpu(), made.to("cpu"), made.new_zeros(2, device="cpu"), torch.ones(2)):
        assert type(tensor) is Tensor
        assert tensor.device == torch.device("cpu")
    assert made.to(torch.zeros(1, dtype=torch.int32)).device == torch.device("cpu")
    assert torch.zeros(2).to(made).device == there.device
    np.testing.assert_array_equal(made.cpu().numpy(), np.arange(6.0).reshape(2, 3))
    made[:, 1] = 7
    made[0].mul_(2)
    np.testing.assert_array_equal(made.cpu().numpy(), [[0, 14, 4], [3, 7, 5]])


@pytest.mark.parametrize(
    "mixing",
    [
        lambda here, there: here + there,
        lambda here, there: torch.cat([there, here]),
        lambda here, there: torch.where(there > 0, there, here),
        lambda here, there: nn.functional.linear(there, here),
        lambda here, there: here[there.long()],
        lambda here, there: there.gather(0, here.long()),
        lambda here, there: there.index_copy(0, here.long(), there),
    ],
)
def test_devices_do_not_mix(there: Simulation, mixing: Callable[[Tensor, Tensor], Tensor]) -> None:
    here = torch.zeros(1)
    with pytest.raises(RuntimeError, match=f"two devices, {there.kind}:0 and cpu"):
        mixing(here, here.to(there.kind))


def test_what_may_be_on_the_cpu(there: Simulation) -> None:
    made = torch.arange(3, device=there.kind)
    assert (made * torch.tensor(2)).device == there.device
    assert made[torch.tensor([2, 0])].tolist() == [2, 0]
    made.copy_(torch.tensor([5, 6, 7]))
    made[1:] = torch.tensor([8, 9])
    assert made.tolist() == [5, 8, 9]


def test_arrays_are_of_the_cpu_only(there: Simulation) -> None:
    made = torch.ones(3, device=there.kind)
    for read in (Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match=f"can't convert {there.device} device type tensor"):
            read(made)


def test_float64() -> None:
    ways = [
        lambda kind: torch.ones(2, device=kind).double(),
        lambda kind: torch.ones(2, dtype=torch.float64).to(kind),
        lambda kind: torch.zeros(2, dtype=torch.float64, device=kind),
        lambda kind: torch.ones(2, device=kind).to("cpu", torch.float64),
        lambda kind: nn.Linear(1, 1).to(kind).double(),
    ]
    for way in ways:
        with cuda():
            way("cuda")
        with (
            mps(),
            pytest.raises(TypeError, match=r"Cannot convert a mps tensor to torch\.float64"),
        ):
            way("mps")


@pytest.mark.parametrize(
    "reading",
    [Tensor.item, bool, float, Tensor.tolist, lambda t: t[t > 0], lambda t: torch.ones(3)[t.int()]],
)
def test_reads_can_be_forbidden(there: Simulation, reading: Callable[[Tensor], object]) -> None:
    one = torch.ones((), device=there.kind)
    if reading is not bool:
        reading(one)
    with there.without_reads():
        (one + 1).exp()
        with pytest.raises(RuntimeError, match="reads back to the host"):
            reading(one)


def test_operations_need_a_kernel() -> None:
    with cuda():
        torch.mode(torch.ones(2, device="cuda"))
    with mps(), pytest.raises(NotImplementedError, match="not implemented for the MPS device"):
        torch.mode(torch.ones(2, device="mps"))


def test_modules(there: Simulation) -> None:
    layer = nn.Linear(3, 2)
    moved = copy.deepcopy(layer).to(there.kind)
    x = torch.randn(4, 3)
    for module, given in ((layer, x), (moved, x.to(there.kind)), (copy.deepcopy(moved), None)):
        if given is None:
            assert module.weight.device == there.device
            continue
        module(given).square().sum().backward()
        torch.optim.AdamW(module.parameters(), lr=0.1, fused=True).step()
    assert isinstance(moved.weight, nn.Parameter)
    assert moved.weight.grad is not None
    assert moved.weight.grad.device == there.device
    torch.testing.assert_close(moved.weight.cpu(), layer.weight)
    file = io.BytesIO()
    torch.save(moved.state_dict(), file)
    file.seek(0)
    assert type(torch.load(file)["weight"]) is Tensor
    moved.half()
    assert moved(x.to(there.kind).half()).dtype == torch.float16
    assert type(moved.cpu().weight) is nn.Parameter
