"""Every mechanism that conf/attention/ offers keeps the contract of `CausalAttention`."""

from __future__ import annotations

import pytest
import torch
import yaml

from imagegen.attention.base import CausalAttention
from imagegen.core.build import build
from tests.attention.contract import Contract, assert_all_close, gradients, inputs, stepped
from tests.attention.helpers import CONF, cases
from tests.reference import reference

LENGTHS = [1, 63, 64, 65, 784]


@pytest.fixture(params=cases())
def attention(request: pytest.FixtureRequest) -> CausalAttention:
    torch.manual_seed(0)
    module = build(
        request.param, CausalAttention, d_model=12, n_heads=2, head_dim=None, row_length=28, layer=0
    )
    return module.double()


class TestContract(Contract):
    """That of all mechanisms."""


@pytest.mark.parametrize("length", LENGTHS)
def test_parallel_form_is_the_reference(attention: CausalAttention, length: int) -> None:
    x = inputs(length, batch=1 if length > 100 else 2).requires_grad_()
    y, expected = attention(x)[0], reference(attention, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    assert_all_close(gradients(attention, x, y), gradients(attention, x, expected))


@torch.no_grad()
def test_cache_grows_without_a_copy_each_step() -> None:
    module = build(
        yaml.safe_load((CONF / "softmax.yaml").read_text()), CausalAttention, d_model=12, n_heads=2
    )
    _, state = stepped(module, torch.randn(1, 65, 12))
    assert state.length == 65
    memory = state.keys.data_ptr()
    _, state = stepped(module, torch.randn(1, 60, 12), state)
    assert state.length == 125
    assert state.keys.data_ptr() == memory
