from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from imagegen.attention import linear_chunks
from imagegen.attention.feature_maps import FEATURE_MAPS, Favor
from imagegen.attention.linear import (
    LinearAttention,
    chunked_linear_attention,
    recurrent_linear_attention,
)
from imagegen.attention.softmax import SoftmaxAttention
from imagegen.cli.entry import compose
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.generation.sampling_loop import generate
from tests.helpers import tiny_model

FAVOR = {"d_model": 16, "n_heads": 2, "feature_map": "favor"}


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_states_under_autocast_are_float32(name: str) -> None:
    module = LinearAttention(16, 2, feature_map=name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, state = module(torch.randn(1, 10, 16))
        _, state = module.step(torch.randn(1, 16), state)
    assert {tensor.dtype for tensor in state.tensors()} == {torch.float32}


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_the_state_follows_the_number_of_features(name: str) -> None:
    module = LinearAttention(12, 2, feature_map=name)
    features = {"polynomial2": 21, "taylor2": 28, "favor": 11, "fourier": 12, "learned": 12}
    state = module.initial_state(3)
    assert state.s.shape == (3, 2, features.get(name, 6), 6)
    shapes = [tensor.shape for tensor in state.tensors()]
    assert shapes == [tensor.shape for tensor in module(torch.randn(3, 70, 12))[1].tensors()]
    assert len(shapes) == (3 if name == "favor" else 2)


@pytest.mark.parametrize("name", ["elu", "relu", "polynomial2", "taylor2"])
def test_maps_without_weights_add_nothing_to_a_checkpoint(name: str) -> None:
    module = LinearAttention(12, 2, feature_map=name)
    assert set(module.state_dict()) == {"qkv.weight", "qkv.bias", "out.weight", "out.bias"}


@torch.no_grad()
@pytest.mark.parametrize("name", ["favor", "fourier"])
def test_a_checkpoint_brings_its_own_draw(name: str) -> None:
    first, second = (LinearAttention(12, 2, feature_map=name) for _ in range(2))
    assert not torch.equal(first.feature_map.omega, second.feature_map.omega)
    second.load_state_dict(first.state_dict())
    x = torch.randn(1, 20, 12)
    assert torch.equal(first(x)[0], second(x)[0])


@torch.no_grad()
def test_favor_comes_close_to_softmax_attention() -> None:
    torch.manual_seed(0)
    favor = LinearAttention(16, 2, feature_map="favor", n_features=4000)
    softmax = SoftmaxAttention(16, 2)
    softmax.load_state_dict(
        {name: value for name, value in favor.state_dict().items() if "omega" not in name}
    )
    elu = LinearAttention(16, 2)
    elu.load_state_dict(softmax.state_dict())
    x = torch.randn(2, 100, 16)
    exact = softmax(x)[0]
    error, other = ((module(x)[0] - exact).square().mean() for module in (favor, elu))
    assert error < 0.01 * exact.square().mean()
    assert error < 0.1 * other


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_huge_inputs_stay_finite_in_float32(name: str) -> None:
    torch.manual_seed(0)
    module = LinearAttention(16, 2, feature_map=name)
    x = (torch.randn(2, 150, 16) * torch.logspace(-3, 3, 150)[:, None]).requires_grad_()
    y, state = module(x)
    gradients = torch.autograd.grad(y.sum(), [x, *module.parameters()])
    assert all(tensor.isfinite().all() for tensor in (y, *state.tensors(), *gradients))
    with torch.no_grad():
        state = module.initial_state(2)
        for position in range(x.shape[1]):
            y, state = module.step(x[:, position], state)
            assert y.isfinite().all()


@pytest.mark.parametrize("name", ["elu", "favor", "fourier"])
def test_scores_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    torch.manual_seed(0)
    module = LinearAttention(12, 2, feature_map=name, chunk_size=8).double()
    x = torch.randn(3, 45, 12, dtype=torch.float64, requires_grad=True)

    def outcome() -> list[torch.Tensor]:
        y, state = module(x)
        total = y.square().sum() + state.s.sin().sum() + state.z.sin().sum()
        return [y, *state.tensors(), *torch.autograd.grad(total, [x, *module.parameters()])]

    expected = outcome()
    monkeypatch.setattr(linear_chunks, "SCORES_AT_A_TIME", 5 * 8**2)
    for got, wanted in zip(outcome(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_little_is_kept_for_the_backward_pass() -> None:
    module = LinearAttention(32, 2)
    x = torch.randn(1, 1024, 32, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, state = module(x)
    weights = sum(weight.nbytes for weight in module.parameters())
    # The input, mapped queries and keys, values, outputs and normalisers; a state a chunk of 64.
    states = (1024 // 64) * sum(tensor.nbytes for tensor in state.tensors())
    assert sum(kept.values()) <= 5 * x.nbytes + 2 * 1024 * 4 + states + weights
    assert y.requires_grad


@torch.no_grad()
def test_favor_is_exact_where_its_features_underflow() -> None:
    torch.manual_seed(0)
    favor = Favor(2, 8)
    q, k, v = torch.randn(3, 1, 2, 60, 8)
    # The first keys and the last ones are so large that exp(-|k|^2 / 2) is 0.
    k[:, :, :50] *= torch.linspace(30, 1, 50)[:, None]
    k[:, :, 50:] *= 30
    log_q, log_k = (favor.double().log_features(x.double()) for x in (q, k))
    assert log_k[:, :, [0, -1]].max() < -110
    logarithms = torch.logsumexp(log_q.unsqueeze(3) + log_k.unsqueeze(2), dim=-1)
    later = torch.ones(60, 60, dtype=torch.bool).triu(1)
    expected = (logarithms.masked_fill(later, -torch.inf).softmax(dim=-1) @ v.double()).float()

    phi_q, (phi_k, scale) = favor.float().queries(q), favor.keys(k)
    y, _ = chunked_linear_attention(phi_q, phi_k, v, None, 16, scale=scale)
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
    _, state = chunked_linear_attention(
        phi_q[:, :, :1], phi_k[:, :, :1], v[:, :, :1], scale=scale[:, :, :1]
    )
    for i in range(1, 60):
        now = (phi_q[:, :, i], phi_k[:, :, i], v[:, :, i])
        y, state = recurrent_linear_attention(*now, state, scale=scale[:, :, i])
        torch.testing.assert_close(y, expected[:, :, i], rtol=1e-2, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("name", ["elu", "fourier"])
def test_normalisers_are_seen_when_asked_for(name: str) -> None:
    torch.manual_seed(0)
    module = LinearAttention(12, 2, feature_map=name, chunk_size=16).double()
    x = torch.randn(2, 37, 12, dtype=torch.float64)
    seen: list[Tensor] = []
    module.normalizer_observer = seen.append
    module(x)
    q, k, _ = module.qkv(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
    scores = module.feature_map.queries(q) @ module.feature_map.keys(k)[0].mT
    expected = scores.tril().sum(dim=-1)
    torch.testing.assert_close(torch.cat(seen), expected)
    seen.clear()
    state = module.initial_state(2)
    for position in range(x.shape[1]):
        _, state = module.step(x[:, position], state)
    torch.testing.assert_close(torch.stack(seen, dim=-1), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_models_of_every_map_generate(name: str) -> None:
    spec = ImageSpec(6, 5, 1, levels=17)
    attention = {"_target_": "imagegen.attention.linear.LinearAttention", "feature_map": name}
    model = tiny_model(spec, attention=attention, n_layers=2)
    sequence = torch.randint(17, (3, 30, 1), dtype=torch.uint8)
    expected = model.parameters_of(sequence)
    parameters, state = model.prefill(sequence[:, :13])
    for position in range(13, 30):
        torch.testing.assert_close(parameters, expected[:, position], rtol=1e-3, atol=1e-4)
        if position < 29:
            parameters, state = model.step(sequence[:, position], state)
    images = np.concatenate(list(generate(model, 7, seed=3)))
    assert np.array_equal(np.concatenate(list(generate(model, 7, seed=3, batch_size=3))), images)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"d_model": 16, "n_heads": 3}, "n_heads=3 does not divide d_model=16"),
        ({"d_model": 16, "n_heads": 0}, "must be at least 1"),
        ({"d_model": 16, "n_heads": 2, "head_dim": 0}, "must be at least 1"),
        ({"d_model": 16, "n_heads": 2, "chunk_size": 0}, "chunk_size=0"),
        ({"d_model": 16, "n_heads": 2, "feature_map": "eluu"}, "choose one of elu, relu, poly"),
        (
            {"d_model": 16, "n_heads": 2, "n_features": 8},
            "for favor and fourier only; .*=elu has 8",
        ),
        ({**FAVOR, "n_features": 0}, "n_features=0 must be at least 1"),
        ({**FAVOR, "feature_map": "fourier", "n_features": 7}, "n_features=7 must be even"),
        ({**FAVOR, "feature_map": "learned", "n_features": 4}, "learned has 16 features here"),
    ],
)
def test_impossible_choices_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        LinearAttention(**options)


def test_small_normalisers_count_as_large_ones() -> None:
    """By default in the recipes: phi(q) may have any factor, which the normaliser takes out."""
    composed = compose("train").attention
    assert composed.eps is None
    attention = LinearAttention(16, 2, feature_map=composed.feature_map, eps=composed.eps)
    assert attention.eps == 1e-12
    assert LinearAttention(16, 2, feature_map="relu", eps=None).eps == 1e-6
    x = torch.randn(2, 200, 16)
    with torch.no_grad():
        attention.qkv.bias[:16] = -4.0  # all features of the queries are exponentials
        expected, _ = attention(x)
        attention.qkv.bias[:16] = -16.0
        for length in (200, 50):  # by the recurrence, and in chunks
            y, state = attention(x[:, :length])
            torch.testing.assert_close(y, expected[:, :length], rtol=1e-3, atol=1e-4)
        y, _ = attention.step(x[:, 50], state)
        torch.testing.assert_close(y, expected[:, 50], rtol=1e-3, atol=1e-4)
        attention.eps = 1e-6
        assert (attention(x)[0] - expected).abs().max() > 0.01


def test_head_dim_may_differ_from_the_width() -> None:
    for cls in (LinearAttention, SoftmaxAttention):
        y, _ = cls(d_model=10, n_heads=4, head_dim=3)(torch.randn(2, 5, 10))
        assert y.shape == (2, 5, 10)
