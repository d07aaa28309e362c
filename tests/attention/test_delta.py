"""What is special about the delta rule, plain and gated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from imagegen.attention.base import CausalAttention
from imagegen.attention.delta import DeltaNet
from imagegen.attention.delta_rule import chunked_delta_rule, recurrent_delta_rule
from imagegen.attention.gated_delta import GatedDeltaNet
from imagegen.core.build import build
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.generation.sampling_loop import complete, generate
from imagegen.model.transformer import ImageTransformer
from tests.helpers import tiny_model

DELTA = {"_target_": "imagegen.attention.delta.DeltaNet"}
GATED = {"_target_": "imagegen.attention.gated_delta.GatedDeltaNet"}
KINDS: dict[str, dict[str, Any]] = {
    "delta": DELTA,
    "head": GATED,
    "channel": {**GATED, "gate": "channel"},
}
SPEC = ImageSpec(4, 4, 3)


def _inputs(
    kind: str, length: int, dim: int = 8, strongest: float = 1.0, batch: int = 1
) -> list[Tensor | None]:
    """Random q, k, v, beta, log_decay and a state, float64, for one head."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, 1, *shape, dtype=torch.float64, generator=generator)

    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (normal(length, dim), normal(length, dim)))
    beta = normal(length).sigmoid()
    decays = {"head": 1, "channel": dim}.get(kind)
    log_decay = None
    if decays:
        # Weak and strong ones, in turn and at random.
        log_decay = -(normal(length, decays).abs() * strongest ** normal(length, decays).sigmoid())
    return [q, k, normal(length, dim), beta, log_decay, normal(dim, dim)]


def _one_by_one(inputs: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    *sequences, s = inputs
    outputs = []
    for i in range(inputs[0].shape[2]):
        y, s = recurrent_delta_rule(*(t if t is None else t[:, :, i] for t in sequences), s.clone())
        outputs.append(y)
    return torch.stack(outputs, dim=2), s


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_chunked_form_are_those_of_its_differences(kind: str) -> None:
    inputs = [t if t is None else t.requires_grad_() for t in _inputs(kind, 5, dim=2)]
    assert torch.autograd.gradcheck(
        lambda *t: chunked_delta_rule(*t, chunk_size=2), inputs, fast_mode=True
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", [1, 2, 16, 32, 128])
def test_chunks_of_any_size_are_the_recurrence(kind: str, chunk_size: int) -> None:
    inputs = _inputs(kind, 50)
    y, s = chunked_delta_rule(*inputs, chunk_size=chunk_size)
    expected, expected_s = _one_by_one(inputs)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(s, expected_s, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["head", "channel"])
@pytest.mark.parametrize("strongest", [10.0, 1e3, 1e6])
def test_strong_decays_are_safe_in_float32(kind: str, strongest: float) -> None:
    inputs = _inputs(kind, 130, strongest=strongest)
    expected = _one_by_one(inputs)[0]
    single = [t if t is None else t.float().requires_grad_() for t in inputs]
    y, _ = chunked_delta_rule(*single)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-6)
    exact = [t if t is None else t.requires_grad_() for t in inputs]
    gradients = torch.autograd.grad(y.square().sum(), single)
    wanted = torch.autograd.grad(chunked_delta_rule(*exact)[0].square().sum(), exact)
    for got, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["head", "channel"])
def test_a_strong_decay_costs_later_ones_no_digits(kind: str) -> None:
    inputs = _inputs(kind, 64)
    inputs[4] = inputs[4] * 1e-3
    inputs[4][:, :, 5] = -1e6
    y, _ = chunked_delta_rule(*(t.float() for t in inputs))
    torch.testing.assert_close(y.double(), _one_by_one(inputs)[0], rtol=0, atol=2e-6)


@torch.no_grad()
def test_a_key_that_comes_again_overwrites() -> None:
    keys = torch.eye(3, dtype=torch.float64)[[0, 1, 0]][None, None]
    values = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    ones, empty = torch.ones(1, 1, 3, dtype=torch.float64), torch.zeros(1, 1, 3, 4).double()
    y, s = chunked_delta_rule(keys, keys, values, ones, None, empty)
    torch.testing.assert_close(y, values)
    torch.testing.assert_close(
        s[0, 0], torch.stack([values[0, 0, 2], values[0, 0, 1], 0 * y[0, 0, 0]])
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_equal_keys_stay_exact_in_float32(kind: str) -> None:
    # The hardest case of the triangular system: every key is the same, written in full.
    inputs = _inputs(kind, 256)
    inputs[1] = inputs[1][:, :, :1].expand_as(inputs[1])
    inputs[3] = torch.ones_like(inputs[3])
    y, _ = chunked_delta_rule(*(t if t is None else t.float() for t in inputs))
    torch.testing.assert_close(y.double(), _one_by_one(inputs)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_keeps_no_state_a_position(kind: str) -> None:
    dim, kept = 64, []

    def bytes_kept(length: int) -> int:
        storages: dict[int, int] = {}

        def remember(t: Tensor) -> Tensor:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            kept.append(t)  # so that no address is used twice
            return t

        inputs = _inputs(kind, length, dim)
        single = [t if t is None else t.float().requires_grad_() for t in inputs]
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t):
            chunked_delta_rule(*single)
        return sum(storages.values())

    short, long = bytes_kept(512), bytes_kept(1024)
    assert long < 2.1 * short
    assert long < 0.4 * 1024 * dim * dim * 4


def _single_and_exact(kind: str) -> tuple[CausalAttention, CausalAttention]:
    torch.manual_seed(0)
    single, exact = (build(KINDS[kind], CausalAttention, d_model=8, n_heads=2) for _ in "12")
    exact.load_state_dict(single.state_dict())
    return single, exact.double()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_positions_stay_exact_in_float32(kind: str) -> None:
    module, exact = _single_and_exact(kind)
    x = torch.randn(1, 4196, 8)
    expected, _ = exact(x.double())
    y, state = module(x[:, :4096])
    torch.testing.assert_close(y.double(), expected[:, :4096], rtol=1e-4, atol=1e-4)
    for position in range(4096, 4196):
        y, state = module.step(x[:, position], state)
    torch.testing.assert_close(y.double(), expected[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("autocast", "typical", "largest"), [(False, 1e-6, 1e-4), (True, 0.01, 0.3)]
)
def test_65536_steps_stay_finite_and_agree_with_float64(
    kind: str, autocast: bool, typical: float, largest: float
) -> None:
    module, exact = _single_and_exact(kind)
    x = torch.randn(1, 65_536, 8)
    expected, _ = exact(x.double())
    state, outputs = module.initial_state(1), []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for position in range(x.shape[1]):
            y, state = module.step(x[:, position], state)
            outputs.append(y)
    difference = torch.stack(outputs, dim=1).double() - expected
    # The largest is where the RMSNorm enlarges an output near 0, and as early as late.
    print(f"RMS {difference.square().mean().sqrt():.1e}, largest {difference.abs().max():.1e}")
    assert difference.square().mean().sqrt() < typical
    assert difference.abs().max() < largest
    assert all(tensor.isfinite().all() for tensor in state.tensors())


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_float32_and_keep_their_size(kind: str) -> None:
    module = build(KINDS[kind], CausalAttention, d_model=16, n_heads=2)
    shapes = [t.shape for t in module.initial_state(2).tensors()]
    values = 16 if kind == "head" else 8
    assert shapes == [(2, 2, 8, values), (2, 3, 2 * (16 + values))]
    for low in (module, module.bfloat16()):
        x = torch.randn(2, 70, 16, dtype=low.qkv.weight.dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, state = low(x)
            o, state = low.step(x[:, 0], state)
        assert y.isfinite().all()
        assert o.isfinite().all()
        assert [t.shape for t in state.tensors()] == shapes
        assert {t.dtype for t in state.tensors()} == {torch.float32}
        # No more memory than it needs: a view would hold on to the sequence.
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in state.tensors())


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> ImageTransformer:
    return tiny_model(
        SPEC,
        attention=KINDS[request.param],
        embedding={"_target_": "imagegen.model.embeddings.Neighbourhood"},
        n_layers=2,
    )


@torch.no_grad()
def test_a_model_prefills_and_steps_as_in_parallel(model: ImageTransformer) -> None:
    images = torch.randint(0, 256, (2, *SPEC.shape), dtype=torch.uint8)
    sequence = model.raster.to_sequence(images)
    expected = model.parameters_of(sequence)
    for split in (1, 20, 40):
        parameters, state = model.prefill(sequence[:, :split])
        for i in range(split, split + 6):
            torch.testing.assert_close(parameters, expected[:, i], rtol=1e-4, atol=1e-4)
            parameters, state = model.step(sequence[:, i], state)


def test_an_image_does_not_depend_on_its_company(model: ImageTransformer) -> None:
    def drawn(n: int, **options: int) -> np.ndarray:
        return np.concatenate(list(generate(model, n, seed=3, **options)))

    expected = drawn(7)
    for n, batch_size in ((1, 1), (7, 4)):
        assert np.array_equal(drawn(n, batch_size=batch_size), expected[:n])
    completed = complete(model, expected, [3] * 7, 2, seed=9)
    assert np.array_equal(complete(model, expected, [3] * 7, 2, seed=9, batch_size=3), completed)
    assert np.array_equal(completed[:, 0, :3], expected[:, :3])


@pytest.mark.parametrize(
    ("cls", "options", "sentence"),
    [
        (DeltaNet, {"chunk_size": 0}, "attention.chunk_size=0 must be a power of two"),
        (DeltaNet, {"conv_size": -1}, "attention.conv_size=-1 must be at least 1, or 0 for none"),
        (DeltaNet, {"norm_eps": 0.0}, "attention.norm_eps=0.0 must be above 0"),
        (GatedDeltaNet, {"gate": "chanel"}, "attention.gate=chanel is unknown; choose one of head"),
        (GatedDeltaNet, {"chunk_size": 48}, "attention.chunk_size=48 must be a power of two"),
        (GatedDeltaNet, {"expand_v": 0.7}, "expand_v=0.7 times head_dim=8 .* but is 5.6"),
    ],
)
def test_impossible_choices_are_refused(cls: Any, options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        cls(16, 2, **options)


def test_decays_start_as_in_mamba_2() -> None:
    torch.manual_seed(0)
    for gate, decays in (("head", 8), ("channel", 64)):
        module = GatedDeltaNet(64, 8, gate=gate)
        rates, steps = module.log_rate.exp(), torch.nn.functional.softplus(module.step_bias)
        assert rates.shape == (8,)
        assert steps.shape == (decays,)
        assert (rates >= 1).all()
        assert (rates <= 16).all()
        assert (steps > 0.00099).all()
        assert (steps < 0.101).all()
