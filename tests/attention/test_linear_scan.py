"""The compiled recurrence of linear attention, against chunks in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from imagegen.attention import linear, linear_scan
from imagegen.attention.linear import LinearAttention, LinearState
from imagegen.attention.linear_scan import CHUNKS, LinearScan, _loops, machine_choice
from imagegen.core.compiled import compile
from tests.reference import reference

compiled = pytest.mark.skipif(_loops() is None, reason="needs Numba, and AVX2 or NEON")


def module(feature_map: str = "elu", head_dim: int = 8, seed: int = 0) -> LinearAttention:
    torch.manual_seed(seed)
    return LinearAttention(2 * head_dim, 2, feature_map=feature_map)


def images(size: int, length: int = 200, batch: int = 3) -> Tensor:
    return torch.randn(batch, length, size, generator=torch.Generator().manual_seed(1))


def gradients(found: Tensor, of: list[Tensor]) -> list[Tensor]:
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    return list(torch.autograd.grad((found * weight.to(found)).sum(), of))


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that went through the recurrence."""
    seen: list[tuple[int, ...]] = []
    apply = LinearScan.apply

    def counted(qkv: Tensor, *rest: object) -> object:
        seen.append(tuple(qkv.shape))
        return apply(qkv, *rest)

    monkeypatch.setattr(linear.LinearScan, "apply", counted)
    return seen


@compiled
@pytest.mark.parametrize("feature_map", ["elu", "relu"])
@pytest.mark.parametrize("head_dim", [8, 32, 40])
def test_outputs_and_gradients_are_the_reference(
    feature_map: str, head_dim: int, scans: list[tuple[int, ...]]
) -> None:
    attention = module(feature_map, head_dim)
    exact = module(feature_map, head_dim).double()
    x = images(2 * head_dim).requires_grad_()
    double = x.detach().double().requires_grad_()
    y, expected = attention(x)[0], reference(exact, double)
    torch.testing.assert_close(y, expected.float(), rtol=1e-4, atol=1e-5)
    found = gradients(y, [x, *attention.parameters()])
    wanted = gradients(expected, [double, *exact.parameters()])
    for ours, theirs in zip(found, wanted, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=2e-5 * scale)
    assert scans == [(3, 200, 3, 2, head_dim)]


@compiled
@pytest.mark.parametrize("split", [128, 129, 199, 263])
def test_it_continues_from_a_state_and_so_do_its_gradients(
    split: int, scans: list[tuple[int, ...]]
) -> None:
    """Also where one of the parts is too short for it."""
    attention, x = module(), images(16, 400).requires_grad_()
    whole, last = attention(x)
    first, state = attention(x[:, :split])
    second, end = attention(x[:, split:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(end.tensors(), last.tensors(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    # The second part's gradients reach the first one through the state alone.
    ours, theirs = gradients(second, [x])[0], gradients(whole[:, split:], [x])[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(scans) >= 3


@compiled
def test_the_last_state_has_gradients() -> None:
    attention, x = module(), images(16).requires_grad_()
    exact, double = module().double(), images(16).double().requires_grad_()
    found = gradients(attention(x)[1].s, [x])[0], gradients(attention(x)[1].z, [x])[0]
    wanted = gradients(exact(double)[1].s, [double])[0], gradients(exact(double)[1].z, [double])[0]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@compiled
def test_bfloat16_is_rounded_where_it_is_stored_alone(scans: list[tuple[int, ...]]) -> None:
    attention, x = module(head_dim=32), images(64).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(x)[0]
        assert y.dtype == torch.bfloat16
        found = gradients(y, [x])[0]
    exact, double = module(head_dim=32).double(), images(64).double().requires_grad_()
    expected = exact(double)[0]
    wanted = gradients(expected, [double])[0]
    assert scans

    def error(ours: Tensor, theirs: Tensor) -> float:
        return float((ours.detach().double() - theirs.detach()).norm() / theirs.detach().norm())

    assert error(y, expected) < 0.01
    assert error(found, wanted) < 0.01


@compiled
def test_numbers_are_rounded_as_pytorch_does() -> None:
    """To the nearest, of two equally near ones to the even one; nan and inf stay what they are."""
    v = torch.tensor([1.0, 1.00390625, 1.01171875, -3.1415927, float("inf"), 0.0, 1e-40, 3e38])
    qkv = torch.ones(1, 128, 3, 1, 8)
    qkv[0, :, 2, 0] = v.bfloat16().float()
    feature_map = module().feature_map
    zeros = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8)
    exact = LinearScan.apply(qkv, *zeros, 1e-6, feature_map)[0]
    rounded = LinearScan.apply(qkv.bfloat16(), *zeros, 1e-6, feature_map)[0]
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded, exact.bfloat16(), rtol=0, atol=0, equal_nan=True)


@compiled
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bad_numbers_are_not_hidden(place: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(1, 128, 3, 1, 8, dtype=dtype)
    qkv[0, 100, place, 0, 3] = float("nan")
    zeros = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8)
    y = LinearScan.apply(qkv, *zeros, 1e-6, module().feature_map)[0]
    assert not y[0, 100].isfinite().all()
    assert y[0, :100].isfinite().all()


@compiled
def test_an_image_does_not_depend_on_its_company_or_on_threads() -> None:
    attention, x = module(), images(16, batch=32)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 64):  # 64: announced in a container, one for each head
            torch.set_num_threads(threads)
            qkv = attention.qkv(x).unflatten(2, (3, 2, 8)).detach().requires_grad_()
            zeros = torch.zeros(32, 2, 8, 8), torch.zeros(32, 2, 8)
            y = LinearScan.apply(qkv, *zeros, 1e-6, attention.feature_map)[0]
            found = y, *gradients(y, [qkv])
            if threads == 1:
                expected = found
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs)
    finally:
        torch.set_num_threads(before)
    alone = LinearScan.apply(qkv[2:3], *(t[2:3] for t in zeros), 1e-6, attention.feature_map)[0]
    assert torch.equal(alone, y[2:3])


@compiled
def test_no_images() -> None:
    attention, x = module(), torch.randn(0, 200, 16, requires_grad=True)
    y = attention(x)[0]
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape  # type: ignore[union-attr]


@compiled
def test_the_normalizer_is_watched() -> None:
    attention, x = module(), images(16)
    seen: list[Tensor] = []
    attention.normalizer_observer = seen.append
    attention(x)
    exact: list[Tensor] = []
    attention.double().normalizer_observer = exact.append
    attention(x.double())
    torch.testing.assert_close(seen[0].double(), exact[0], rtol=1e-4, atol=1e-5)
    assert not seen[0].requires_grad


def test_chunks_do_where_the_recurrence_cannot(scans: list[tuple[int, ...]]) -> None:
    x = images(16)
    cases = {
        "127 positions, fewer than 128": (module(), x[:, :127]),
        "another feature map than relu and elu": (module("learned"), x),
        "in float64": (module().double(), x.double()),
        "attention.qk_norm normalises queries and keys": (LinearAttention(16, 2, qk_norm=True), x),
        "heads of 6 features, not a multiple of 8": (LinearAttention(12, 2), images(12)),
    }
    for why, (attention, x) in cases.items():
        attention(x)
        assert str(attention.computed(x.shape[1], x.device, x.dtype)) == f"{CHUNKS}: {why}"
    assert not scans
    elsewhere = module().computed(200, torch.device("cuda"), torch.float32)
    assert str(elsewhere) == f"{CHUNKS}: on cuda"
    assert module().computed(200, x.device, torch.bfloat16) == machine_choice()


def test_without_compiled_loops_chunks_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention, x = module(), images(16)
    y = attention(x)[0]

    def broken(name: str) -> None:
        raise ImportError("Numba needs NumPy 2.3 or less")

    linear_scan._loops.cache_clear()
    monkeypatch.setattr(linear_scan, "load", broken)
    try:
        torch.testing.assert_close(attention(x)[0], y, rtol=1e-4, atol=1e-5)
        attention(x)
        told = f"linear attention {CHUNKS}: Numba needs NumPy 2.3 or less"
        assert capsys.readouterr().err.splitlines() == [told]
    finally:
        linear_scan._loops.cache_clear()


@compiled
@pytest.mark.parametrize(
    ("features", "chosen"),
    [
        ({}, f"{CHUNKS}: this CPU has neither AVX2 nor NEON"),
        ({"fma": True}, f"{CHUNKS}: this CPU has neither AVX2 nor NEON"),
        ({"neon": True}, "compiled recurrence: compiled for NEON"),
        ({"fma": True, "avx2": True}, "compiled recurrence: compiled for FMA, AVX2"),
    ],
)
def test_the_processor_decides(
    features: dict[str, bool], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = compile.target()._replace(features=features)
    monkeypatch.setattr(compile, "target", lambda: other)
    assert str(machine_choice()) == chosen


@compiled
def test_steps_continue_from_its_state() -> None:
    attention, x = module(), images(16)
    with torch.no_grad():
        expected, _ = attention(x)
        _, state = attention(x[:, :150])
        assert isinstance(state, LinearState)
        for n in range(150, 160):
            y, state = attention.step(x[:, n], state)
            torch.testing.assert_close(y, expected[:, n], rtol=1e-4, atol=1e-5)
