"""What the mechanisms with a decaying state share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from imagegen.attention.decay import (
    chunked_decay_attention,
    decayed_scores,
    recurrent_decay_attention,
    segment_sums,
)
from imagegen.attention.decay_attention import DecayAttention
from imagegen.attention.gla import GatedLinearAttention
from imagegen.attention.retention import Retention
from imagegen.attention.short_convolution import ShortConvolution
from imagegen.attention.ssd import StateSpaceDuality
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.generation.sampling_loop import complete, generate
from imagegen.model.transformer import ImageTransformer
from tests.helpers import tiny_model

MECHANISMS = [Retention, StateSpaceDuality, GatedLinearAttention]
SPEC = ImageSpec(4, 4, 3)


def _recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, s: Tensor) -> Tensor:
    rows = []
    for t in range(q.shape[2]):
        s = log_decay[:, :, t].exp().unsqueeze(-1) * s + k[:, :, t, :, None] * v[:, :, t, None]
        rows.append((q[:, :, t, None] @ s).squeeze(2))
    return torch.stack(rows, dim=2)


@pytest.fixture(params=["a head", "a feature"])
def problem(request: pytest.FixtureRequest) -> list[Tensor]:
    """Queries, keys, values, decays from none to annihilating, and a state, in float32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 100, 5, generator=generator) for _ in range(3))
    strengths = torch.tensor([0.0, 1e-6, 1e-3, 0.1, 3.0, 80.0, 1e4, 1e38])
    size = (2, 3, 100, 1 if request.param == "a head" else 5)
    log_decay = -strengths[torch.randint(8, size, generator=generator)]
    return [q, k, v, log_decay, torch.randn(2, 3, 5, 5, generator=generator)]


def test_decays_of_any_strength_are_exact_in_float32(problem: list[Tensor]) -> None:
    inputs = [t.requires_grad_() for t in problem]
    y, _ = chunked_decay_attention(*inputs)
    exact = [t.detach().double().requires_grad_() for t in problem]
    expected = _recurrence(*exact)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((y * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight).sum(), exact)
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_weak_decay_after_a_strong_one_keeps_its_digits() -> None:
    # As a difference of cumulative sums, 1e-3 beside 1e6 would be lost in float32.
    log_decay = torch.full((1, 1, 64, 1), -1e-3)
    log_decay[:, :, 3] = -1e6
    levels, from_start, to_end = segment_sums(log_decay)
    ones = torch.ones(1, 1, 64, 1)
    scores = decayed_scores(ones, ones, levels)[0, 0]
    assert scores[63, 3].item() == pytest.approx(np.exp(-0.06), rel=1e-6)
    assert scores[63, 2].item() == 0
    assert (scores.triu(1) == 0).all()
    assert from_start[0, 0, 2].item() == pytest.approx(-3e-3, rel=1e-6)
    assert to_end[0, 0, 62].item() == pytest.approx(-1e-3, rel=1e-6)
    assert to_end[0, 0, 63].item() == 0


def test_the_backward_pass_keeps_one_state_a_chunk() -> None:
    n, d, m = 1024, 60, 72
    for size in (1, d):
        q, k, v = (torch.randn(1, 1, n, f, requires_grad=True) for f in (d, d, m))
        log_decay = -torch.rand(1, 1, n, size).requires_grad_()
        kept: dict[int, int] = {}
        states: set[int] = set()

        def keep(tensor: Tensor, kept: dict = kept, states: set = states) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            if tensor.shape[-2:] == (d, m):
                states.add(storage.data_ptr())
            return tensor

        s = torch.zeros(1, 1, d, m)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y, _ = chunked_decay_attention(q, k, v, log_decay, s, chunk_size=64)
        y.sum().backward()
        assert len(states) == n // 64
        assert sum(kept.values()) < 0.3 * n * d * m * 4


@pytest.mark.parametrize("mechanism", MECHANISMS)
@torch.no_grad()
def test_thousands_of_positions_in_float32_agree_with_float64(
    mechanism: type[DecayAttention],
) -> None:
    torch.manual_seed(0)
    module, exact = mechanism(8, 2), mechanism(8, 2)
    exact.load_state_dict(module.state_dict())
    x = torch.randn(1, 5100, 8)
    expected, _ = exact.double()(x.double())
    y, state = module(x[:, :5000])
    torch.testing.assert_close(y.double(), expected[:, :5000], rtol=1e-3, atol=1e-4)
    for position in range(5000, 5100):
        y, state = module.step(x[:, position], state)
    torch.testing.assert_close(y.double(), expected[:, -1], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-3), (True, 0.1)])
@torch.no_grad()
def test_65536_steps_stay_finite_and_agree_with_float64(
    mechanism: type[DecayAttention], autocast: bool, tolerance: float
) -> None:
    torch.manual_seed(0)
    module, exact = mechanism(8, 2), mechanism(8, 2)
    exact.load_state_dict(module.state_dict())
    x = torch.randn(1, 65_536, 8)
    expected, _ = exact.double()(x.double())
    state, worst = module.initial_state(1), 0.0
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for position in range(x.shape[1]):
            y, state = module.step(x[:, position], state)
            worst = max(worst, (y.double() - expected[:, position]).abs().max().item())
    print(f"largest difference {worst:.1e}, largest output {expected.abs().max():.2f}")
    assert worst < tolerance
    assert all(torch.isfinite(tensor).all() for tensor in state.tensors())


@pytest.mark.parametrize("mechanism", MECHANISMS)
@torch.no_grad()
def test_states_are_float32_and_keep_their_size(mechanism: type[DecayAttention]) -> None:
    module = mechanism(16, 2, conv_size=4)
    before = [tensor.shape for tensor in module.initial_state(2).tensors()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, state = module(torch.randn(2, 70, 16))
        _, state = module.step(torch.randn(2, 16), state)
    assert [tensor.shape for tensor in state.tensors()] == before
    assert {tensor.dtype for tensor in state.tensors()} == {torch.float32}
    # No more memory than it needs: a view would hold on to the sequence.
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in state.tensors())


@pytest.mark.parametrize("mechanism", MECHANISMS)
@torch.no_grad()
def test_steps_reuse_the_memory_of_the_state(mechanism: type[DecayAttention]) -> None:
    module = mechanism(16, 2)
    state = module.initial_state(2)
    memory = state.s.data_ptr()
    for _ in range(3):
        _, state = module.step(torch.randn(2, 16), state)
    assert state.s.data_ptr() == memory
    assert state.position == 3


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"chunk_size": 0}, "chunk_size=0 must be a power of two"),
        ({"chunk_size": 48}, "chunk_size=48 must be a power of two"),
        ({"conv_size": -1}, "conv_size=-1 must be at least 1, or 0 for none"),
    ],
)
def test_impossible_choices_are_refused(
    mechanism: type[DecayAttention], options: dict, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        mechanism(16, 2, **options)


@pytest.mark.parametrize("size", [0, 1, 4])
def test_short_convolution_continues(size: int) -> None:
    torch.manual_seed(0)
    module, x = ShortConvolution(3, size, bias=True), torch.randn(2, 9, 3)
    empty = module.initial_state(2, x.dtype, x.device)
    expected, after = module(x, empty)
    for split in range(1, 9):
        first, state = module(x[:, :split], empty)
        second, state = module(x[:, split:], state)
        torch.testing.assert_close(torch.cat([first, second], dim=1), expected)
        torch.testing.assert_close(state, after)


def test_step_without_gradients_is_the_step_with_them(problem: list[Tensor]) -> None:
    q, k, v, log_decay = (t[:, :, 0] for t in problem[:4])
    expected = recurrent_decay_attention(q, k, v, log_decay, problem[4].clone())
    with torch.no_grad():
        y = recurrent_decay_attention(q, k, v, log_decay, problem[4].clone())
    torch.testing.assert_close(y, expected)


@pytest.fixture(params=MECHANISMS)
def model(request: pytest.FixtureRequest) -> ImageTransformer:
    target = f"{request.param.__module__}.{request.param.__name__}"
    return tiny_model(
        SPEC,
        attention={"_target_": target, "conv_size": 3},
        embedding={"_target_": "imagegen.model.embeddings.Neighbourhood"},
        n_layers=2,
    )


@torch.no_grad()
def test_a_model_prefills_and_steps_as_it_trains(model: ImageTransformer) -> None:
    model = model.double()
    images = torch.randint(0, 256, (2, *SPEC.shape), dtype=torch.uint8)
    sequence = model.raster.to_sequence(images)
    expected = model.parameters_of(sequence)
    for split in (1, 20, 46):
        parameters, state = model.prefill(sequence[:, :split])
        torch.testing.assert_close(parameters, expected[:, split], rtol=1e-10, atol=1e-10)
        parameters, _ = model.step(sequence[:, split], state)
        torch.testing.assert_close(parameters, expected[:, split + 1], rtol=1e-10, atol=1e-10)


def test_an_image_does_not_depend_on_its_company(model: ImageTransformer) -> None:
    expected = np.concatenate(list(generate(model, 6, seed=3)))
    assert len(np.unique(expected.reshape(6, -1), axis=0)) == 6
    for n, batch_size in ((1, 1), (6, 4)):
        drawn = np.concatenate(list(generate(model, n, seed=3, batch_size=batch_size)))
        assert np.array_equal(drawn, expected[:n])
    assert np.array_equal(complete(model, expected[:2], [2, 2], 1, seed=3)[:, 0], expected[:2])
