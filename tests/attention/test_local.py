from __future__ import annotations

import pytest
import torch

from imagegen.attention.buffers import ring_after, ring_in_order, ring_step
from imagegen.attention.local import LocalAttention
from imagegen.attention.softmax import SoftmaxAttention
from imagegen.core.errors import UserError
from imagegen.generation.decode.waiting import no_waiting


@torch.no_grad()
def test_a_window_of_one_is_the_value_itself() -> None:
    module = LocalAttention(8, 2, window=1)
    x = torch.randn(2, 70, 8)
    v = module.qkv(x)[..., 16:]
    torch.testing.assert_close(module(x)[0], module.out(v))


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 63, 200])
def test_a_window_over_everything_is_softmax_attention(length: int) -> None:
    local, softmax = LocalAttention(8, 2, window=1000).double(), SoftmaxAttention(8, 2).double()
    softmax.load_state_dict(local.state_dict())
    x = torch.randn(2, length, 8, dtype=torch.float64)
    torch.testing.assert_close(local(x)[0], softmax(x)[0], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_the_state_keeps_its_size_and_memory() -> None:
    module = LocalAttention(8, 2, window=5)
    state = module.initial_state(3)
    before = [(t.shape, t.data_ptr()) for t in state.tensors()]
    for _ in range(12):
        _, state = module.step(torch.randn(3, 8), state)
    assert [(t.shape, t.data_ptr()) for t in state.tensors()] == before
    _, state = module(torch.randn(3, 99, 8), state)
    assert [t.shape for t in state.tensors()] == [shape for shape, _ in before]
    assert state.length == 111


def test_states_under_autocast_are_float32() -> None:
    module = LocalAttention(16, 2, window=4)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        _, state = module(torch.randn(1, 10, 16))
        y, state = module.step(torch.randn(1, 16), state)
    assert {tensor.dtype for tensor in state.tensors()} == {torch.float32}
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("window", [0, -3])
def test_windows_without_a_position_are_refused(window: int) -> None:
    with pytest.raises(UserError, match=f"attention.window={window} must be at least 1"):
        LocalAttention(8, 2, window=window)


@torch.no_grad()
def test_rings_keep_the_last_positions() -> None:
    positions = torch.arange(1.0, 30).view(1, 1, -1, 1)
    for start in range(12):
        ring = ring_after(torch.zeros(1, 1, 4, 1), positions[:, :, :start], 0)
        for length in range(start, start + 9):
            kept = ring_in_order(ring, length).flatten().tolist()
            assert kept == [float(max(0, p)) for p in range(length - 3, length + 1)]
            ring = ring_step(ring, positions[:, :, length : length + 1], length)


@torch.no_grad()
@pytest.mark.parametrize("places", [1, 4])
def test_a_ring_takes_the_length_as_a_tensor(places: int) -> None:
    """In the same memory, and without reading the tensor back to the host."""
    by_number, by_tensor = torch.randn(2, 2, 3, places, 5).unbind()
    by_tensor.copy_(by_number)
    length = torch.zeros((), dtype=torch.int64)
    for new in torch.randn(9, 2, 3, 1, 5):
        ring_step(by_number, new, int(length))
        with no_waiting(length.device):
            assert ring_step(by_tensor, new, length).data_ptr() == by_tensor.data_ptr()
        assert torch.equal(by_tensor, by_number)
        length += 1
