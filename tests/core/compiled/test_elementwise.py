from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit
from torch.nn import functional as F

from imagegen.core.compiled.elementwise import (
    ACTIVATIONS,
    activate,
    add_scaled,
    exp32,
    normalize,
    softplus32,
)

RNG = np.random.default_rng(0)


@njit
def _exp(x, out):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        out[i] = exp32(x[i])


def test_exponential() -> None:
    x = np.linspace(-87, 88, 200_001).astype(np.float32)
    out = np.empty_like(x)
    _exp(x, out)
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 4e-7
    far = np.array([-1e30, -200, 0, -0.0], dtype=np.float32)
    out = np.empty_like(far)
    _exp(far, out)
    assert out[0] == out[1] < 2e-38
    assert out[2] == out[3] == 1


@njit
def _softplus(x, out):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        out[i] = softplus32(x[i])


def test_softplus() -> None:
    x = np.linspace(-80, 100, 200_001).astype(np.float32)
    out = np.empty_like(x)
    _softplus(x, out)
    assert np.abs(out / np.logaddexp(0, x.astype(np.float64)) - 1).max() < 1e-6


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    x = (RNG.standard_normal((5, 37)) * 4).astype(np.float32)
    x[0, :4] = [-100, 100, 0, -0.0]
    y = x.copy()
    activate(y, 37, False, ACTIVATIONS[name], 0, 5)
    expected = getattr(F, name)(torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-6)
    gated = RNG.standard_normal((3, 20)).astype(np.float32)
    y = gated.copy()
    activate(y, 10, True, ACTIVATIONS[name], 0, 3)
    gate, value = torch.from_numpy(gated).double().chunk(2, dim=-1)
    np.testing.assert_allclose(y[:, :10], (getattr(F, name)(gate) * value), atol=1e-6)


@pytest.mark.parametrize("centred", [True, False])
def test_norms(centred: bool) -> None:
    x, weight, bias = (RNG.standard_normal(s).astype(np.float32) for s in ((7, 33), 33, 33))
    x += 3
    out = np.empty_like(x)
    normalize(x, weight, bias, np.float32(1e-5), centred, out, 0, 7)
    t, w, b = (torch.from_numpy(a).double() for a in (x, weight, bias))
    expected = F.layer_norm(t, (33,), w, b) if centred else F.rms_norm(t, (33,), w, 1e-5) + b
    np.testing.assert_allclose(out, expected, atol=3e-6)
    # In place, and one row by itself, to the last bit.
    alone = x[2:3].copy()
    normalize(alone, weight, bias, np.float32(1e-5), centred, alone, 0, 1)
    assert np.array_equal(alone[0], out[2])


def test_sums() -> None:
    x, y, scale = (RNG.standard_normal(s).astype(np.float32) for s in ((3, 9), (3, 16), 9))
    expected = x + y[:, :9] * scale
    add_scaled(x, y, scale, 0, 3)
    np.testing.assert_allclose(x, expected, rtol=1e-6)
