from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from imagegen.core.errors import UserError
from imagegen.heads.base import OutputHead
from imagegen.heads.categorical import Categorical
from imagegen.heads.controls import Controls, nucleus, tempered
from imagegen.heads.mixture_of_logistics import MixtureOfLogistics

EXTREMES = [-1e30, -1e6, -100.0, -7.0, -1.0, 0.0, 1.0, 7.0, 100.0, 1e6, 1e30]


def _head(kind: str, levels: int) -> OutputHead:
    torch.manual_seed(0)
    if kind == "categorical":
        return Categorical(8, levels)
    per_step = 3 if "colour" in kind else 1
    if "softmax" not in kind:
        return MixtureOfLogistics(8, levels, per_step)
    return MixtureOfLogistics(8, levels, per_step, n_mixtures=4, categorical=True)


def _size(head: OutputHead) -> int:
    return head(torch.zeros(8)).shape[-1]


def _uniforms(n: int, per_step: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, per_step, dtype=torch.float64, generator=generator).clamp(1e-12)


@pytest.mark.parametrize("kind", ["mixture", "categorical", "softmax"])
@pytest.mark.parametrize("levels", [2, 17, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_sum_to_one(kind: str, levels: int, dtype: torch.dtype) -> None:
    head = _head(kind, levels)
    generator = torch.Generator().manual_seed(1)
    for spread in (0.1, 1.0, 5.0, 30.0):
        parameters = spread * torch.randn(200, _size(head), dtype=dtype, generator=generator)
        total = head.log_probabilities(parameters).double().exp().sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["mixture", "softmax"])
@given(
    values=st.lists(st.sampled_from(EXTREMES), min_size=30, max_size=30),
    levels=st.sampled_from([17, 256]),
)
@settings(max_examples=100, deadline=None)
def test_extreme_parameters(kind: str, values: list[float], levels: int) -> None:
    head = _head(kind, levels)
    size = _size(head)
    parameters = torch.tensor((values * size)[:size], requires_grad=True)
    total = head.log_probabilities(parameters).double().exp().sum()
    assert abs(total.item() - 1) < 1e-6
    ends = torch.tensor([0, 1, levels - 2, levels - 1])
    loss = head.log_prob(parameters.expand(4, -1), ends.unsqueeze(-1))
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
    torch.testing.assert_close(head.log_prob(parameters, values[:, None]).squeeze(-1), expected)


@pytest.mark.parametrize("kind", ["mixture", "categorical", "softmax"])
@pytest.mark.parametrize("levels", [2, 17, 256])
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_draws_follow_the_probabilities(kind: str, levels: int, spread: float) -> None:
    head = _head(kind, levels)
    generator = torch.Generator().manual_seed(levels)
    parameters = spread * torch.randn(1, _size(head), generator=generator)
    n = 200_000
    drawn = head.sample(parameters.expand(n, -1), _uniforms(n, head.uniforms_per_step))
    expected = n * head.log_probabilities(parameters[0].double()).exp().numpy()
    _check_counts(np.bincount(drawn[:, 0].numpy(), minlength=levels), expected)


def _check_counts(observed: np.ndarray, expected: np.ndarray) -> None:
    # Cells of fewer than five expected draws are put together, as the test asks for.
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    result = stats.chisquare(observed[kept], expected[kept] * observed.sum() / expected.sum())
    assert result.pvalue > 1e-4


@pytest.mark.parametrize("kind", ["mixture", "categorical", "softmax"])
def test_temperature(kind: str) -> None:
    head = _head(kind, 256)
    parameters = torch.randn(1, _size(head)) * 2
    uniforms = _uniforms(5000, head.uniforms_per_step)
    many = parameters.expand(5000, -1)
    spread = {
        t: head.sample(many, uniforms, Controls(temperature=t)).double().std().item()
        for t in (0.3, 1.0)
    }
    assert spread[0.3] < spread[1.0]
    greedy = head.sample(many, uniforms, Controls(temperature=0.0))
    assert (greedy == head.log_probabilities(parameters)[0].argmax()).all()


@pytest.mark.parametrize("kind", ["mixture", "categorical", "colour", "softmax", "colour, softmax"])
def test_draws_stay_inside_for_the_outermost_uniforms(kind: str) -> None:
    head = _head(kind, 17)
    ends = torch.tensor([[2.0**-54], [1 - 2.0**-53]], dtype=torch.float64)
    uniforms = ends.expand(2, head.uniforms_per_step)
    for value in EXTREMES:
        drawn = head.sample(torch.full((2, _size(head)), value), uniforms)
        assert 0 <= drawn.min() <= drawn.max() <= 16


def test_means_start_spread_over_the_range() -> None:
    head = MixtureOfLogistics(8, 256, n_mixtures=5)
    means = head(torch.zeros(8)).chunk(3)[1]
    torch.testing.assert_close(means, torch.tensor([-0.8, -0.4, 0.0, 0.4, 0.8]))
    uniform = math.log(256)
    cost = -head.log_prob(head(torch.zeros(256, 8)), torch.arange(256)[:, None]).mean().item()
    assert cost < uniform + 0.15


def test_too_few_components_are_refused() -> None:
    with pytest.raises(UserError, match="n_mixtures=0 must be at least 1"):
        MixtureOfLogistics(8, 256, n_mixtures=0)


@pytest.mark.parametrize("per_step", [1, 3])
def test_a_softmax_is_one_component_more(per_step: int) -> None:
    """p = sum over logistics of w_k p_k + w times the product over s of softmax_s(x_s)."""
    head = _head("colour, softmax" if per_step == 3 else "softmax", 17).double()
    parameters = torch.randn(_size(head), dtype=torch.float64)
    values = torch.tensor([5, 0, 16])[:per_step]
    weights, rest = parameters[:5].softmax(0), parameters[5 + 17 * per_step :]
    alone = MixtureOfLogistics(8, 17, per_step, n_mixtures=4)
    expected = torch.zeros((), dtype=torch.float64)
    for k in range(4):
        one = torch.full((4,), -1e9, dtype=torch.float64)
        one[k] = 0
        expected += weights[k] * alone.log_prob(torch.cat([one, rest]), values).sum().exp()
    rows = parameters[5 : 5 + 17 * per_step].view(per_step, 17).softmax(-1)
    expected += weights[4] * torch.stack([rows[s, x] for s, x in enumerate(values)]).prod()
    torch.testing.assert_close(head.log_prob(parameters, values).sum(), expected.log())


@pytest.mark.parametrize("prediction", [False, True])
def test_a_softmax_begins_small(prediction: bool) -> None:
    head = MixtureOfLogistics(8, 17, 3, categorical=True)
    if prediction:
        head.start_from_prediction()
    parameters = head.projection.bias
    assert (parameters[:10] == 0).all()
    assert parameters[:11].softmax(0)[10].item() == pytest.approx(0.005, abs=0.0001)
    assert (parameters[11:62] == 0).all()


@pytest.mark.parametrize("kind", ["softmax", "colour, softmax"])
def test_controls_act_on_the_levels_of_a_softmax(kind: str) -> None:
    head = _head(kind, 17)
    per_step = head.values_per_step
    generator = torch.Generator().manual_seed(3)
    parameters = torch.randn(1, _size(head), generator=generator)
    parameters[:, :5] = torch.tensor([-100.0, -100, -100, -100, 0])
    scores = parameters[0, 5 : 5 + 17 * per_step].view(per_step, 17).double()
    n = 100_000
    rows, uniforms = parameters.expand(n, -1), _uniforms(n, 1 + per_step)
    for controls, expected in (
        (Controls(temperature=0.5), (2 * scores).softmax(-1)),
        (Controls(top_p=0.5), nucleus(scores, 0.5).softmax(-1)),
    ):
        drawn = head.sample(rows, uniforms, controls)
        for s in range(per_step):
            counts = np.bincount(drawn[:, s].numpy(), minlength=17)
            _check_counts(counts, n * expected[s].numpy())
    sure = Controls(mixture_temperature=1.0, scale_temperature=0.0)
    assert (head.sample(rows, uniforms, sure) == scores.argmax(-1)).all()


@pytest.mark.parametrize("kind", ["colour", "colour, softmax"])
def test_values_of_a_step_are_chained(kind: str) -> None:
    """Sum of the chain's terms = the joint probability, summed over all colours: 1."""
    head = _head(kind, 5)
    parameters = torch.randn(4, _size(head), dtype=torch.float64)
    colours = torch.cartesian_prod(*[torch.arange(5)] * 3)
    log_prob = head.log_prob(parameters[:, None].expand(-1, 125, -1), colours.expand(4, -1, -1))
    total = log_prob.sum(-1).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-9)
    for known in range(3):
        rows = parameters[:, None].expand(-1, 125, -1)
        given = colours[:, :known].expand(4, -1, -1)
        conditional = head.log_probabilities(rows, given)
        torch.testing.assert_close(
            conditional.gather(-1, colours[:, known, None].expand(4, -1, -1)).squeeze(-1),
            log_prob[..., known],
        )


def test_colour_mixture_is_that_of_pixelcnnpp() -> None:
    """Green's mean moves with red, blue's with both, in one component (Salimans et al., 2017)."""
    head = MixtureOfLogistics(8, 256, values_per_step=3, n_mixtures=2)
    parameters = torch.randn(20, dtype=torch.float64) * 0.5
    values = torch.tensor([[10, 200, 90]])
    logits, parts = parameters[:2], parameters[2:].view(9, 2)
    means, scales, (alpha, beta, gamma) = parts[:3], parts[3:6].exp(), parts[6:].tanh()
    red, green, _ = (values[0] / 255 * 2 - 1).double()
    centres = [means[0], means[1] + alpha * red, means[2] + beta * red + gamma * green]
    mass = torch.ones(2, dtype=torch.float64)
    for value, centre, scale in zip(values[0].tolist(), centres, scales, strict=True):
        x = value / 255 * 2 - 1
        upper, lower = ((x + half - centre) / scale for half in (1 / 255, -1 / 255))
        mass = mass * (upper.sigmoid() - lower.sigmoid())
    expected = (logits.softmax(0) * mass).sum().log()
    torch.testing.assert_close(head.log_prob(parameters[None], values).sum(), expected)


def test_means_lie_around_a_prediction() -> None:
    """The mean is y_s + mean_s / 5 + sum over r < s of tanh(c_sr) (x_r - y_r)."""
    head = MixtureOfLogistics(8, 256, values_per_step=3, n_mixtures=2).double()
    head.start_from_prediction()
    hidden, prediction = torch.randn(8).double(), torch.tensor([0.3, -0.2, 0.9]).double()
    alone, around = head(hidden), head(hidden, prediction)
    x = torch.tensor([0.5, -0.7, 0.1]).double()
    means, scales, coefficients = alone[2:].view(9, 2).split(3)
    alpha, beta, gamma = coefficients.tanh()
    rest = x - prediction
    expected = prediction[:, None] + means / 5
    expected = expected + torch.stack(
        [torch.zeros(2).double(), alpha * rest[0], beta * rest[0] + gamma * rest[1]]
    )
    *_, means, seen_scales, coefficients = head._bounded(around)
    torch.testing.assert_close(head._shifted(means, coefficients, x[:, None]), expected)
    torch.testing.assert_close(seen_scales, scales)
    torch.testing.assert_close(head(hidden, torch.zeros(3).double())[:2], alone[:2])


def test_residual_means_are_finer_where_levels_are() -> None:
    units = [MixtureOfLogistics(8, levels).residual_unit for levels in (2, 17, 52, 103, 256)]
    assert units == pytest.approx([1, 1, 1, 0.5, 0.2])


def test_a_channel_errs_as_the_one_before_it_at_first() -> None:
    head = MixtureOfLogistics(8, 256, values_per_step=3)
    head.start_from_prediction()
    *_, coefficients = head._bounded(head(torch.zeros(8)))
    expected = torch.tensor([0.8, 0.0, 0.8])[:, None].expand(3, 10)
    torch.testing.assert_close(coefficients.tanh(), expected)


@pytest.mark.parametrize("kind", ["colour", "colour, softmax"])
@pytest.mark.parametrize("guidance", [None, 1.0])
def test_colours_drawn_follow_the_probabilities(kind: str, guidance: float | None) -> None:
    head = _head(kind, 4)
    parameters = torch.randn(1, _size(head), generator=torch.Generator().manual_seed(3))
    n = 100_000
    rows, uniforms = parameters.expand(n, -1), _uniforms(n, head.uniforms_per_step)
    if guidance is None:
        drawn = head.sample(rows, uniforms)
    else:
        other = torch.randn(1, _size(head)).expand(n, -1)
        drawn = head.sample_guided(rows, other, uniforms, Controls(guidance=guidance))
    colours = torch.cartesian_prod(*[torch.arange(4)] * 3)
    log_prob = head.log_prob(parameters.double().expand(64, -1), colours).sum(-1)
    index = (drawn * torch.tensor([16, 4, 1])).sum(-1)
    _check_counts(np.bincount(index.numpy(), minlength=64), n * log_prob.exp().numpy())


@pytest.mark.parametrize("kind", ["mixture", "categorical", "colour", "softmax", "colour, softmax"])
def test_guidance_moves_away_from_the_unconditional(kind: str) -> None:
    head = _head(kind, 17)
    generator = torch.Generator().manual_seed(5)
    with_label, without = (torch.randn(1, _size(head), generator=generator) for _ in range(2))
    n = 100_000
    uniforms = _uniforms(n, head.uniforms_per_step)
    controls = Controls(guidance=2.5)
    drawn = head.sample_guided(with_label.expand(n, -1), without.expand(n, -1), uniforms, controls)
    conditional, plain = (head.log_probabilities(p[0].double()) for p in (with_label, without))
    expected = (plain + 2.5 * (conditional - plain)).softmax(-1)
    _check_counts(np.bincount(drawn[:, 0].numpy(), minlength=17), n * expected.numpy())


@pytest.mark.parametrize("kind", ["mixture", "colour", "softmax", "colour, softmax"])
def test_temperatures_of_mixtures(kind: str) -> None:
    head = _head(kind, 256)
    parameters = torch.randn(1, _size(head), generator=torch.Generator().manual_seed(2)) * 2
    n = 2000
    rows, uniforms = parameters.expand(n, -1), _uniforms(n, head.uniforms_per_step)
    # The widest component alone, at its centre: one colour only.
    sure = Controls(mixture_temperature=0.0, scale_temperature=0.0)
    assert len(head.sample(rows, uniforms, sure).unique(dim=0)) == 1
    narrow = head.sample(rows, uniforms, Controls(scale_temperature=0.0)).unique(dim=0)
    assert isinstance(head, MixtureOfLogistics)
    assert 1 < len(narrow) <= head.n_components
    wide = head.sample(rows, uniforms, Controls(mixture_temperature=0.0)).unique(dim=0)
    assert len(wide) > 1


def test_a_temperature_of_zero_leaves_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.1, 0.5, -1.0, 0.5]])
    assert tempered(logits, 0.0).softmax(dim=-1).tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("kind", ["mixture", "categorical", "colour", "softmax", "colour, softmax"])
def test_every_uniform_number_matters(kind: str) -> None:
    head = _head(kind, 256)
    parameters, uniforms = torch.randn(50, _size(head)), _uniforms(50, head.uniforms_per_step)
    drawn = head.sample(parameters, uniforms)
    for u in range(head.uniforms_per_step):
        other = uniforms.clone()
        other[:, u] = 1 - other[:, u]
        assert not torch.equal(head.sample(parameters, other), drawn)


def test_nucleus_keeps_the_smallest_set_that_reaches_top_p() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    for top_p, kept in (
        (0.3, [1]),
        (0.5, [1]),
        (0.51, [1, 3]),
        (0.8, [1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ):
        finite = nucleus(logits, top_p)[0].isfinite().nonzero().flatten().tolist()
        assert finite == kept


@pytest.mark.parametrize("kind", ["mixture", "categorical", "colour", "softmax", "colour, softmax"])
def test_top_p_leaves_out_what_is_rare(kind: str) -> None:
    head = _head(kind, 256)
    generator = torch.Generator().manual_seed(4)
    parameters = torch.randn(1, _size(head), generator=generator) * 3
    rows, uniforms = parameters.expand(3000, -1), _uniforms(3000, head.uniforms_per_step)
    every, few = (head.sample(rows, uniforms, Controls(top_p=p)).unique(dim=0) for p in (1.0, 0.3))
    assert len(few) < len(every)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be a finite number of at least 0"),
        ({"mixture_temperature": float("nan")}, "mixture_temperature=nan must be"),
        ({"scale_temperature": -1.0}, "scale_temperature=-1.0 must be"),
        ({"guidance": float("inf")}, "guidance=inf must be"),
        ({"guidance": 2.0, "mixture_temperature": 0.5}, "mixture_temperature has no meaning with"),
        ({"guidance": 0.0, "scale_temperature": 0.5}, "scale_temperature has no meaning with"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5 must be"),
    ],
)
def test_controls_out_of_range_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Controls(**options)


def test_what_a_categorical_head_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match="mixture_temperature belongs to mixtures"):
        _head("categorical", 17).check(Controls(mixture_temperature=0.5))
    with pytest.raises(UserError, match="head=categorical models one value per step; take"):
        Categorical(8, 256, values_per_step=3)
