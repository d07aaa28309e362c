from __future__ import annotations

import pytest
import torch

from imagegen.attention.gla import GatedLinearAttention
from imagegen.core.errors import UserError


@pytest.mark.parametrize("bias", [-1e4, -50.0, 0.0, 50.0])
def test_strong_gates_stay_finite_in_float32(bias: float) -> None:
    torch.manual_seed(0)
    module = GatedLinearAttention(16, 2, gate_temperature=0.1)
    with torch.no_grad():
        module.decay[1].bias.fill_(bias)
    x = torch.randn(2, 130, 16, requires_grad=True)
    y, _ = module(x)
    assert torch.isfinite(y).all()
    for gradient in torch.autograd.grad(y.square().sum(), [x, *module.parameters()]):
        assert torch.isfinite(gradient).all()


@torch.no_grad()
def test_an_open_gate_is_linear_attention_without_a_normaliser() -> None:
    torch.manual_seed(0)
    module = GatedLinearAttention(8, 1, expand_k=1.0, output_norm=False, output_gate=False)
    module.decay[1].weight.zero_()
    module.decay[1].bias.fill_(100.0)
    x = torch.randn(1, 70, 8)
    q, k, v = module.qkv(x)[0].split(8, dim=-1)
    expected = module.out((q @ k.T / 8**0.5).tril() @ v)
    torch.testing.assert_close(module(x)[0][0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"head_dim": 5}, "expand_k=0.5 times head_dim=5 makes 2.5 features"),
        ({"expand_v": -1}, "expand_v=-1 times head_dim=8 makes -8 features"),
        ({"gate_rank": 0}, "gate_rank=0 must be at least 1"),
        ({"gate_temperature": 0}, "gate_temperature=0 must be above 0"),
    ],
)
def test_impossible_choices_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        GatedLinearAttention(16, 2, **options)


def test_companions_can_be_left_out() -> None:
    module = GatedLinearAttention(10, 4, head_dim=4, output_norm=False, output_gate=False)
    y, state = module(torch.randn(2, 5, 10))
    assert y.shape == (2, 5, 10)
    assert state.s.shape == (2, 4, 2, 4)
