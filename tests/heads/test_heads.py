from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from imagegen.errors import UserError
from imagegen.heads.base import OutputHead
from imagegen.heads.categorical import Categorical
from imagegen.heads.mixture_of_logistics import MixtureOfLogistics

EXTREMES = [-1e30, -1e6, -100.0, -7.0, -1.0, 0.0, 1.0, 7.0, 100.0, 1e6, 1e30]


def _head(kind: str, levels: int) -> OutputHead:
    torch.manual_seed(0)
    return MixtureOfLogistics(8, levels) if kind == "mixture" else Categorical(8, levels)


def _size(head: OutputHead) -> int:
    return head(torch.zeros(8)).shape[-1]


def _uniforms(n: int, per_value: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, per_value, dtype=torch.float64, generator=generator).clamp(1e-12)


@pytest.mark.parametrize("kind", ["mixture", "categorical"])
@pytest.mark.parametrize("levels", [2, 17, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_sum_to_one(kind: str, levels: int, dtype: torch.dtype) -> None:
    head = _head(kind, levels)
    generator = torch.Generator().manual_seed(1)
    for spread in (0.1, 1.0, 5.0, 30.0):
        parameters = spread * torch.randn(200, _size(head), dtype=dtype, generator=generator)
        total = head.log_probabilities(parameters).double().exp().sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-6)


@given(st.lists(st.sampled_from(EXTREMES), min_size=30, max_size=30), st.sampled_from([17, 256]))
@settings(max_examples=100, deadline=None)
def test_extreme_parameters(values: list[float], levels: int) -> None:
    head = _head("mixture", levels)
    parameters = torch.tensor(values, requires_grad=True)
    total = head.log_probabilities(parameters).double().exp().sum()
    assert abs(total.item() - 1) < 1e-6
    ends = torch.tensor([0, 1, levels - 2, levels - 1])
    loss = head.log_prob(parameters.expand(4, -1), ends)
    assert torch.isfinite(loss).all()
    (gradient,) = torch.autograd.grad(loss.sum(), parameters)
    assert torch.isfinite(gradient).all()


def test_mixture_is_the_difference_of_cumulative_functions() -> None:
    head = _head("mixture", 256)
    parameters = torch.randn(50, 30, dtype=torch.float64)
    logits, means, log_scales = parameters.chunk(3, dim=-1)
    weights, scales = logits.softmax(-1).numpy(), log_scales.exp().numpy()
    levels = np.arange(256)[:, None, None]
    x = levels / 255 * 2 - 1
    cdf_upper = stats.logistic.cdf((x + 1 / 255 - means.numpy()) / scales)
    cdf_lower = stats.logistic.cdf((x - 1 / 255 - means.numpy()) / scales)
    mass = np.where(levels == 255, 1, cdf_upper) - np.where(levels == 0, 0, cdf_lower)
    expected = torch.from_numpy((weights * mass).sum(-1).T)
    torch.testing.assert_close(
        head.log_probabilities(parameters).exp(), expected, rtol=1e-9, atol=1e-12
    )


def test_categorical_is_a_softmax() -> None:
    head = _head("categorical", 17)
    parameters = torch.randn(6, 17)
    values = torch.tensor([0, 3, 16, 8, 1, 2])
    expected = -torch.nn.functional.cross_entropy(parameters, values, reduction="none")
    torch.testing.assert_close(head.log_prob(parameters, values), expected)


@pytest.mark.parametrize("kind", ["mixture", "categorical"])
@pytest.mark.parametrize("levels", [2, 17, 256])
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_draws_follow_the_probabilities(kind: str, levels: int, spread: float) -> None:
    head = _head(kind, levels)
    generator = torch.Generator().manual_seed(levels)
    parameters = spread * torch.randn(1, _size(head), generator=generator)
    n = 200_000
    drawn = head.sample(parameters.expand(n, -1), _uniforms(n, head.uniforms_per_value))
    observed = np.bincount(drawn.numpy(), minlength=levels)
    expected = n * head.log_probabilities(parameters[0].double()).exp().numpy()
    # Cells of fewer than five expected draws are put together, as the test asks for.
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    result = stats.chisquare(observed[kept], expected[kept] * observed.sum() / expected.sum())
    assert result.pvalue > 1e-4


@pytest.mark.parametrize("kind", ["mixture", "categorical"])
def test_temperature(kind: str) -> None:
    head = _head(kind, 256)
    parameters = torch.randn(1, _size(head)) * 2
    uniforms = _uniforms(5000, head.uniforms_per_value)
    many = parameters.expand(5000, -1)
    spread = {t: head.sample(many, uniforms, t).double().std().item() for t in (0.3, 1.0)}
    assert spread[0.3] < spread[1.0]
    greedy = head.sample(many, uniforms, 0.0)
    assert (greedy == head.log_probabilities(parameters)[0].argmax()).all()


@pytest.mark.parametrize("kind", ["mixture", "categorical"])
def test_draws_stay_inside_for_the_outermost_uniforms(kind: str) -> None:
    head = _head(kind, 17)
    ends = torch.tensor([[2.0**-54], [1 - 2.0**-53]], dtype=torch.float64)
    uniforms = ends.expand(2, head.uniforms_per_value)
    for value in EXTREMES:
        drawn = head.sample(torch.full((2, _size(head)), value), uniforms, 1.0)
        assert 0 <= drawn.min() <= drawn.max() <= 16


def test_means_start_spread_over_the_range() -> None:
    head = MixtureOfLogistics(8, 256, n_mixtures=5)
    means = head(torch.zeros(8)).chunk(3)[1]
    torch.testing.assert_close(means, torch.tensor([-0.8, -0.4, 0.0, 0.4, 0.8]))
    uniform = math.log(256)
    cost = -head.log_prob(head(torch.zeros(256, 8)), torch.arange(256)).mean().item()
    assert cost < uniform + 0.15


def test_too_few_components_are_refused() -> None:
    with pytest.raises(UserError, match="n_mixtures=0 must be at least 1"):
        MixtureOfLogistics(8, 256, n_mixtures=0)
