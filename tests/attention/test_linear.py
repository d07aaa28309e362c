from __future__ import annotations

import pytest
import torch

from imagegen.attention.feature_maps import elu
from imagegen.attention.linear import LinearAttention
from imagegen.attention.softmax import SoftmaxAttention
from imagegen.errors import UserError


def test_elu_is_elu_plus_one() -> None:
    x = torch.linspace(-30, 30, 1001, dtype=torch.float64)
    torch.testing.assert_close(elu(x), torch.nn.functional.elu(x) + 1, rtol=1e-12, atol=1e-12)


def test_elu_keeps_strongly_negative_inputs_in_bfloat16() -> None:
    x = torch.tensor([-40.0, -20.0, -8.0, 0.0, 3.0], dtype=torch.bfloat16, requires_grad=True)
    y = elu(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    exact = torch.tensor([-40.0, -20.0, -8.0, 0.0, 3.0]).exp().clamp(max=1)
    torch.testing.assert_close(gradient.float(), exact, rtol=0.01, atol=0)
    assert (y > 0).all()


def test_elu_has_finite_gradients_for_huge_inputs() -> None:
    x = torch.tensor([1e4, -1e4], requires_grad=True)
    (gradient,) = torch.autograd.grad(elu(x).sum(), x)
    assert gradient.tolist() == [1.0, 0.0]


def test_states_under_autocast_are_float32() -> None:
    module = LinearAttention(16, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, state = module(torch.randn(1, 10, 16))
    assert {tensor.dtype for tensor in state.tensors()} == {torch.float32}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"d_model": 16, "n_heads": 3}, "n_heads=3 does not divide d_model=16"),
        ({"d_model": 16, "n_heads": 0}, "must be at least 1"),
        ({"d_model": 16, "n_heads": 2, "head_dim": 0}, "must be at least 1"),
        ({"d_model": 16, "n_heads": 2, "chunk_size": 0}, "chunk_size=0"),
        ({"d_model": 16, "n_heads": 2, "feature_map": "eluu"}, "choose one of elu, relu"),
    ],
)
def test_impossible_choices_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        LinearAttention(**options)


def test_head_dim_may_differ_from_the_width() -> None:
    for cls in (LinearAttention, SoftmaxAttention):
        y, _ = cls(d_model=10, n_heads=4, head_dim=3)(torch.randn(2, 5, 10))
        assert y.shape == (2, 5, 10)
