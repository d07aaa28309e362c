"""Every mechanism that conf/attention/ offers keeps the contract of `CausalAttention`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from imagegen.attention.base import CausalAttention
from imagegen.attention.feature_maps import FEATURE_MAPS
from imagegen.attention.softmax import SoftmaxAttention
from imagegen.build import build
from tests.reference import reference

CONF = Path(__file__).parents[2] / "conf" / "attention"
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "delta": [{}, {"conv_size": 0, "output_norm": False, "chunk_size": 8}, {"output_gate": True}],
    "gated_delta": [{}, {"gate": "channel"}, {"gate": "channel", "chunk_size": 8, "expand_v": 1.5}],
    "gla": [{}, {"expand_k": 1.0, "conv_size": 4, "gate_temperature": 0.02, "chunk_size": 32}],
    "hybrid": [{}, {"pattern": [{"name": "local", "window": 7}, "linear"]}],
    "linear": [*({"feature_map": name} for name in FEATURE_MAPS), {"chunk_size": 7}],
    "local": [{"window": 64}, {"window": 5}],
    "lsh": [{"rounds": 1}, {"rounds": 4, "n_buckets": 4, "chunk_size": 32}],
    "retention": [{}, {"rotary": False, "conv_size": 3, "expand_v": 1.0, "chunk_size": 8}],
    "ssd": [{"d_state": 8}, {"d_state": 5, "conv_size": 0, "skip": False, "chunk_size": 16}],
    "strided": [{"combine": "heads"}, {"combine": "merged", "stride": 7}, {"stride": 1}],
}
LENGTHS = [1, 63, 64, 65, 784]


def _cases() -> Iterator[Any]:
    for path in sorted(CONF.glob("*.yaml")):
        for variant in VARIANTS.get(path.stem, [{}]):
            options = {**yaml.safe_load(path.read_text()), **variant}
            name = "-".join([path.stem, *(f"{key}:{value}" for key, value in variant.items())])
            yield pytest.param(options, id=name)


@pytest.fixture(params=_cases())
def attention(request: pytest.FixtureRequest) -> CausalAttention:
    torch.manual_seed(0)
    module = build(
        request.param, CausalAttention, d_model=12, n_heads=2, head_dim=None, row_length=28, layer=0
    )
    return module.double()


def _input(length: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, 12, dtype=torch.float64, generator=generator)


def _stepped(module: CausalAttention, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    state = module.initial_state(len(x)) if state is None else state
    outputs = []
    for position in range(x.shape[1]):
        y, state = module.step(x[:, position], state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def _gradients(module: CausalAttention, x: Tensor, y: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(y.shape, dtype=y.dtype, generator=generator)
    return list(torch.autograd.grad((y * weight).sum(), [x, *module.parameters()]))


@pytest.mark.parametrize("length", LENGTHS[:-1])
def test_parallel_form_is_the_reference(attention: CausalAttention, length: int) -> None:
    x = _input(length).requires_grad_()
    y, expected = attention(x)[0], reference(attention, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    for got, wanted in zip(
        _gradients(attention, x, y), _gradients(attention, x, expected), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("length", LENGTHS)
def test_steps_are_the_parallel_form(attention: CausalAttention, length: int) -> None:
    x = _input(length, batch=1 if length > 100 else 2).requires_grad_()
    expected, y = attention(x)[0], _stepped(attention, x)[0]
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    for got, wanted in zip(
        _gradients(attention, x, y), _gradients(attention, x, expected), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_steps_in_place_are_the_parallel_form(attention: CausalAttention) -> None:
    x = _input(200)
    torch.testing.assert_close(_stepped(attention, x)[0], attention(x)[0], rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("length", [65, 130])
def test_every_split_continues(attention: CausalAttention, length: int) -> None:
    x = _input(length)
    expected, _ = attention(x)
    for split in range(1, length):
        prefix, state = attention(x[:, :split])
        torch.testing.assert_close(prefix, expected[:, :split], rtol=1e-10, atol=1e-10)
        # Both forms go on from the state; stepping may use up its memory.
        rest, _ = attention(x[:, split:], state.clone())
        torch.testing.assert_close(rest, expected[:, split:], rtol=1e-10, atol=1e-10)
        last = min(split + 3, length)
        stepped, _ = _stepped(attention, x[:, split:last], state)
        torch.testing.assert_close(stepped, expected[:, split:last], rtol=1e-10, atol=1e-10)


def test_gradient_flows_through_a_split(attention: CausalAttention) -> None:
    x = _input(65).requires_grad_()
    prefix, state = attention(x[:, :30])
    y = torch.cat([prefix, attention(x[:, 30:], state)[0]], dim=1)
    for got, wanted in zip(
        _gradients(attention, x, y), _gradients(attention, x, attention(x)[0]), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


@torch.no_grad()
@pytest.mark.parametrize("length", [65, 200])
def test_no_output_sees_a_later_input(attention: CausalAttention, length: int) -> None:
    x = _input(length)
    expected, _ = attention(x)
    for position in (0, 1, length // 2, 63, 64, length - 1):
        changed = x.clone()
        changed[:, position:] += 100 * torch.randn_like(changed[:, position:])
        y, _ = attention(changed)
        assert torch.equal(y[:, :position], expected[:, :position])
        assert not torch.equal(y[:, position], expected[:, position])


@torch.no_grad()
def test_states_are_forked_and_used_again(attention: CausalAttention) -> None:
    x = _input(40, batch=2)
    continuation = _input(5, batch=6)
    _, state = attention(x)
    forked = state.repeat(3)
    first, _ = _stepped(attention, continuation, forked)
    again, _ = _stepped(attention, continuation, state.repeat(3))
    assert torch.equal(first, again)
    whole = torch.cat([x.repeat_interleave(3, dim=0), continuation], dim=1)
    torch.testing.assert_close(first, attention(whole)[0][:, 40:], rtol=1e-10, atol=1e-10)
    assert state.repeat(3).tensors()[0].shape[0] == 6


@torch.no_grad()
def test_states_of_linear_attention_keep_their_size() -> None:
    module = build(
        yaml.safe_load((CONF / "linear.yaml").read_text()), CausalAttention, d_model=12, n_heads=2
    )
    before = [tensor.shape for tensor in module.initial_state(2).tensors()]
    _, state = attention_state = module(torch.randn(2, 784, 12))
    assert [tensor.shape for tensor in attention_state[1].tensors()] == before
    _, state = _stepped(module, torch.randn(2, 9, 12), state)
    assert [tensor.shape for tensor in state.tensors()] == before


@torch.no_grad()
def test_cache_grows_without_a_copy_each_step() -> None:
    module = build(
        yaml.safe_load((CONF / "softmax.yaml").read_text()), CausalAttention, d_model=12, n_heads=2
    )
    _, state = _stepped(module, torch.randn(1, 65, 12))
    assert state.length == 65
    memory = state.keys.data_ptr()
    _, state = _stepped(module, torch.randn(1, 60, 12), state)
    assert state.length == 125
    assert state.keys.data_ptr() == memory


@torch.no_grad()
def test_low_precision_keeps_float32_states(attention: CausalAttention) -> None:
    attention = attention.float()
    x = _input(65).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = attention(x)
        _, after = attention.step(x[:, 0], attention.initial_state(len(x)))
    torch.testing.assert_close(y.float(), attention(x)[0], rtol=0.05, atol=0.05)
    # A cache of keys and values sums nothing up, and may be as short as what is put into it.
    if not isinstance(attention, SoftmaxAttention):
        for tensor in (*state.tensors(), *after.tensors()):
            assert tensor.dtype == torch.float32 or not tensor.is_floating_point()
