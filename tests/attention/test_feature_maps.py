from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from imagegen.attention.feature_maps import (
    Favor,
    FeatureMap,
    Fourier,
    Learned,
    build_feature_map,
    elu,
)
from tests.reference.linear import function_kernel


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _vectors(n: int, head_dim: int, n_heads: int = 1) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, 1, n_heads, n, head_dim, dtype=torch.float64)
    return q, k


def _scores(feature_map: FeatureMap, q: Tensor, k: Tensor) -> Tensor:
    return feature_map.queries(q) @ feature_map.keys(k)[0].mT


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


def test_elu_gradients_of_negative_inputs_are_exact_in_bfloat16() -> None:
    x = torch.tensor([-80.0, -40.0, -20.0, -8.0, -1.0, -0.01], dtype=torch.bfloat16)
    (gradient,) = torch.autograd.grad(elu(x.requires_grad_()).sum(), x)
    assert torch.equal(gradient, x.detach().double().exp().bfloat16())
    assert (gradient > 0).all()


def test_elu_has_finite_gradients_for_huge_inputs() -> None:
    x = torch.tensor([1e4, -1e4], requires_grad=True)
    (gradient,) = torch.autograd.grad(elu(x).sum(), x)
    assert gradient.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("head_dim", [1, 2, 7])
@pytest.mark.parametrize(("name", "features"), [("polynomial2", 0), ("taylor2", 1)])
def test_polynomials_are_their_kernels(name: str, features: int, head_dim: int) -> None:
    q, k = _vectors(5, head_dim)
    feature_map = build_feature_map(name, 1, head_dim)
    kernel = function_kernel(name)
    expected = torch.stack([kernel(query, k[0, 0]) for query in q[0, 0]])
    torch.testing.assert_close(_scores(feature_map, q, k)[0, 0], expected)
    assert feature_map.feature_dim == head_dim * (head_dim + 1) // 2 + features * (1 + head_dim)
    assert feature_map.queries(q).shape[-1] == feature_map.feature_dim


def test_taylor2_is_positive_and_close_to_the_exponential() -> None:
    q, k = _vectors(100, 4)
    exact = (q @ k.mT / 2).exp()
    scores = _scores(build_feature_map("taylor2", 1, 4), q, k)
    assert scores.min() >= 0.5
    small = exact.log().abs() < 0.3
    torch.testing.assert_close(scores[small], exact[small], rtol=0.01, atol=0)


def test_favor_is_unbiased() -> None:
    q, k = (x / 2 for x in _vectors(6, 4))
    favor = Favor(1, 4, 400_000).double()
    estimate = favor.log_features(q).exp() @ favor.log_features(k).exp().mT
    torch.testing.assert_close(estimate, (q @ k.mT / 2).exp(), rtol=0.01, atol=0)


def test_favor_keys_come_with_their_scale() -> None:
    q, k = _vectors(6, 4, n_heads=3)
    favor = Favor(3, 4).double()
    features, scale = favor.keys(k)
    assert scale is not None
    exact = favor.log_features(k).exp()
    torch.testing.assert_close(features * scale.exp().unsqueeze(-1), exact)
    assert torch.equal(features.amax(dim=-1), torch.ones_like(scale))
    ratio = favor.queries(q) / favor.log_features(q).exp()
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))


def test_favor_draws_are_normal_and_orthogonal() -> None:
    favor = Favor(500, 4, 10)
    blocks = favor.omega[:, :8].unflatten(1, (2, 4))
    products = blocks @ blocks.mT
    off_diagonal = products - torch.diag_embed(products.diagonal(dim1=-2, dim2=-1))
    assert off_diagonal.abs().max() < 1e-4
    # The last block is cut short, and blocks are independent of one another, as are heads.
    assert (blocks[:, 0] @ blocks[:, 1].mT).abs().mean() > 1
    values = favor.omega.flatten().double()
    moments = [(values**power).mean().item() for power in (1, 2, 4)]
    assert moments == pytest.approx([0, 1, 3], abs=0.12)


def test_orthogonal_draws_estimate_better_than_independent_ones() -> None:
    q, k = _vectors(50, 8, n_heads=40)
    q, k = q / 2, k / 2
    exact = (q @ k.mT / 8**0.5).exp()
    favor = Favor(40, 8, 8).double()

    def error() -> float:
        estimate = favor.log_features(q).exp() @ favor.log_features(k).exp().mT
        return (estimate - exact).square().mean().item()

    orthogonal = error()
    favor.omega = torch.randn_like(favor.omega)
    assert orthogonal < 0.9 * error()


@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_fourier_is_unbiased(sigma: float) -> None:
    q, k = _vectors(6, 4)
    fourier = Fourier(1, 4, 400_000).double()
    with torch.no_grad():
        fourier.sigma.fill_(sigma)
        fourier.sigma[..., 0] = 0.5
    unit_q, unit_k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    difference = unit_q.unsqueeze(-2) - unit_k.unsqueeze(-3)
    exact = (-(fourier.sigma[0, 0] * difference).square().sum(dim=-1) / 2).exp()
    torch.testing.assert_close(_scores(fourier, q, k), exact, rtol=0, atol=0.01)


def test_fourier_takes_zero_vectors() -> None:
    fourier = Fourier(2, 4)
    x = torch.zeros(1, 2, 3, 4, requires_grad=True)
    features = fourier.queries(x)
    (gradient,) = torch.autograd.grad(features.sum(), x)
    assert features.isfinite().all()
    assert gradient.isfinite().all()


def test_fourier_floor_lies_below_what_a_key_adds() -> None:
    unit = torch.tensor([[[[1.0, 0.0, 0.0]]]])
    least = _scores(Fourier(1, 3, 400_000), unit, -unit)
    assert least.item() == pytest.approx(math.exp(-2), abs=0.01)
    assert Fourier.floor is not None
    assert Fourier.floor < math.exp(-2)


def test_learned_begins_as_the_identity() -> None:
    x, _ = _vectors(3, 5, n_heads=2)
    learned = Learned(2, 5).double()
    expected = torch.cat([x.softmax(dim=-1), (-x).softmax(dim=-1)], dim=-1)
    torch.testing.assert_close(learned.queries(x), expected)
    torch.testing.assert_close(learned.keys(x)[0], expected)


def test_learned_has_a_map_for_each_head_of_queries_and_of_keys() -> None:
    x, _ = _vectors(3, 5, n_heads=2)
    learned = Learned(2, 5).double()
    before = learned.queries(x)
    with torch.no_grad():
        learned.query_weight[1] += torch.randn(5, 5)
    after = learned.queries(x)
    assert torch.equal(after[:, 0], before[:, 0])
    assert not torch.allclose(after[:, 1], before[:, 1])
    assert torch.equal(learned.keys(x)[0], before)


@pytest.mark.parametrize(
    ("name", "head_dim", "expected"),
    [("favor", 64, 266), ("favor", 32, 111), ("favor", 1, 1), ("fourier", 32, 64)],
)
def test_default_numbers_of_random_features(name: str, head_dim: int, expected: int) -> None:
    assert build_feature_map(name, 2, head_dim).feature_dim == expected
