"""The contract of `CausalAttention`: what every mechanism is tested for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from imagegen.attention.base import AttentionState, CausalAttention
from imagegen.attention.hybrid import HybridAttention
from imagegen.attention.softmax import SoftmaxAttention


def inputs(length: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, 12, dtype=torch.float64, generator=generator)


def stepped(module: CausalAttention, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    state = module.initial_state(len(x)) if state is None else state
    outputs = []
    for position in range(x.shape[1]):
        y, state = module.step(x[:, position], state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def gradients(module: CausalAttention, x: Tensor, y: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(y.shape, dtype=y.dtype, generator=generator)
    return list(torch.autograd.grad((y * weight).sum(), [x, *module.parameters()]))


def assert_all_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


def _splits(module: CausalAttention, length: int) -> list[int]:
    """At both ends, in the middle, and around the first chunk, or what a mechanism has for one."""
    mechanism = _mechanism(module)
    sizes = [getattr(mechanism, name, 0) for name in ("chunk_size", "window", "stride")]
    chunk = max(sizes) or 64
    splits = {1, chunk - 1, chunk, chunk + 1, length // 2, length - 1}
    return sorted(split for split in splits if 0 < split < length)


def _mechanism(module: CausalAttention) -> CausalAttention:
    return module.mechanism if isinstance(module, HybridAttention) else module


def _held(state: AttentionState) -> int:
    """Bytes that the state keeps from being freed, which a view would hide."""
    return sum(tensor.untyped_storage().nbytes() for tensor in state.tensors())


class Contract:
    """The tests of a mechanism; a module with a subclass named `Test...` gives it `attention`."""

    # Gradients through 784 steps take most of the time, and show nothing that those through 200
    # do not.
    @pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
    def test_steps_are_the_parallel_form(self, attention: CausalAttention, length: int) -> None:
        x = inputs(length, batch=1 if length > 100 else 2).requires_grad_()
        expected, y = attention(x)[0], stepped(attention, x)[0]
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        assert_all_close(gradients(attention, x, y), gradients(attention, x, expected))

    @torch.no_grad()
    def test_steps_in_place_are_the_parallel_form(self, attention: CausalAttention) -> None:
        x = inputs(784)
        torch.testing.assert_close(
            stepped(attention, x)[0], attention(x)[0], rtol=1e-10, atol=1e-10
        )

    @torch.no_grad()
    @pytest.mark.parametrize("length", [65, 130])
    def test_every_split_continues(self, attention: CausalAttention, length: int) -> None:
        x = inputs(length)
        expected, _ = attention(x)
        for split in range(1, length) if length > 100 else _splits(attention, length):
            prefix, state = attention(x[:, :split])
            torch.testing.assert_close(prefix, expected[:, :split], rtol=1e-10, atol=1e-10)
            # Both forms go on from the state; stepping may use up its memory.
            rest, _ = attention(x[:, split:], state.clone())
            torch.testing.assert_close(rest, expected[:, split:], rtol=1e-10, atol=1e-10)
            last = min(split + 3, length)
            y, _ = stepped(attention, x[:, split:last], state)
            torch.testing.assert_close(y, expected[:, split:last], rtol=1e-10, atol=1e-10)

    def test_gradients_flow_through_splits(self, attention: CausalAttention) -> None:
        length = 130
        x = inputs(length).requires_grad_()
        expected = gradients(attention, x, attention(x)[0])
        for split in _splits(attention, length):
            # The rest in parallel, and a few steps before it.
            for resumed in (split, min(split + 3, length)):
                y, state = attention(x[:, :split])
                outputs = [y]
                if resumed > split:
                    y, state = stepped(attention, x[:, split:resumed], state)
                    outputs.append(y)
                if resumed < length:
                    outputs.append(attention(x[:, resumed:], state)[0])
                assert_all_close(gradients(attention, x, torch.cat(outputs, dim=1)), expected)

    @torch.no_grad()
    @pytest.mark.parametrize("length", [65, 200, 784])
    def test_no_output_sees_a_later_input(self, attention: CausalAttention, length: int) -> None:
        x = inputs(length)
        expected, _ = attention(x)
        for position in (0, 1, length // 2, 63, 64, length - 1):
            changed = x.clone()
            changed[:, position:] += 100 * torch.randn_like(changed[:, position:])
            y, _ = attention(changed)
            assert torch.equal(y[:, :position], expected[:, :position])
            assert not torch.equal(y[:, position], expected[:, position])

    @torch.no_grad()
    def test_states_are_forked_and_used_again(self, attention: CausalAttention) -> None:
        x = inputs(40, batch=2)
        continuation = inputs(5, batch=6)
        _, state = attention(x)
        forked = state.repeat(3)
        first, _ = stepped(attention, continuation, forked)
        again, _ = stepped(attention, continuation, state.repeat(3))
        assert torch.equal(first, again)
        whole = torch.cat([x.repeat_interleave(3, dim=0), continuation], dim=1)
        torch.testing.assert_close(first, attention(whole)[0][:, 40:], rtol=1e-10, atol=1e-10)
        # In memory of its own, and image i as images 3 i to 3 i + 2.
        for own, repeated in zip(state.tensors(), state.repeat(3).tensors(), strict=True):
            assert torch.equal(repeated, own.repeat_interleave(3, dim=0))
            assert not own.numel() or repeated.data_ptr() != own.data_ptr()

    @torch.no_grad()
    def test_states_keep_their_size_unless_they_are_said_to_grow(
        self, attention: CausalAttention
    ) -> None:
        x = inputs(784, batch=1)
        held = {}
        _, state = attention.step(x[:, 0], attention.initial_state(1))
        held[1] = _held(state)
        _, state = stepped(attention, x[:, 1:64], state)
        held[64] = _held(state)
        _, state = attention(x[:, 64:-1], state)
        _, state = attention.step(x[:, -1], state)
        held[784] = _held(state)
        held[4096] = _held(attention(inputs(4096, batch=1))[1])
        if not attention.constant_state:
            assert held[1] <= held[64] < held[784] < held[4096]
        else:
            assert set(held.values()) == {_held(attention.initial_state(1))}

    @torch.no_grad()
    def test_low_precision_keeps_float32_states(self, attention: CausalAttention) -> None:
        attention = attention.float()
        x = inputs(65).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, state = attention(x)
            _, after = attention.step(x[:, 0], attention.initial_state(len(x)))
        torch.testing.assert_close(y.float(), attention(x)[0], rtol=0.05, atol=0.05)
        # A cache of keys and values sums nothing up, and may be as short as what is put into it.
        if not isinstance(attention, SoftmaxAttention):
            for tensor in (*state.tensors(), *after.tensors()):
                assert tensor.dtype == torch.float32 or not tensor.is_floating_point()
