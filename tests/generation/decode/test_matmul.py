from __future__ import annotations

import numpy as np
import pytest

from imagegen.generation.decode.matmul import PANEL, linear, pack, pad

RNG = np.random.default_rng(0)


def _layer(inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    weight = RNG.standard_normal((outputs, inputs)).astype(np.float32)
    return weight, RNG.standard_normal(outputs).astype(np.float32)


def _apply(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    out = np.full((len(x), len(pad(bias))), np.nan, dtype=np.float32)
    linear(x, pack(weight), pad(bias), 0, len(pad(bias)) // PANEL, out)
    return out


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (5, 16), (32, 30), (64, 33), (7, 100)])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 13])
def test_product(rows: int, inputs: int, outputs: int) -> None:
    weight, bias = _layer(inputs, outputs)
    x = RNG.standard_normal((rows, inputs)).astype(np.float32)
    out = _apply(x, weight, bias)
    expected = x.astype(np.float64) @ weight.T + bias
    np.testing.assert_allclose(out[:, :outputs], expected, rtol=0, atol=1e-5 * np.sqrt(inputs))
    # Whole panels are written, padded with zeros.
    assert not out[:, outputs:].any()


def test_a_row_does_not_depend_on_its_company() -> None:
    weight, bias = _layer(200, 48)
    x = RNG.standard_normal((29, 200)).astype(np.float32)
    expected = _apply(x, weight, bias)
    for first, last in ((0, 1), (3, 5), (0, 6), (5, 18), (28, 29)):
        assert np.array_equal(_apply(x[first:last].copy(), weight, bias), expected[first:last])


def test_rows_may_lie_apart() -> None:
    weight, bias = _layer(20, 16)
    wide = RNG.standard_normal((8, 50)).astype(np.float32)
    out = np.zeros((8, 40), dtype=np.float32)
    linear(wide[:, :20], pack(weight), pad(bias), 0, 1, out)
    assert np.array_equal(out[:, :16], _apply(wide[:, :20].copy(), weight, bias))
    assert not out[:, 16:].any()


def test_panels_can_be_shared_out() -> None:
    weight, bias = _layer(30, 70)
    x = RNG.standard_normal((4, 30)).astype(np.float32)
    out = np.full((4, 80), np.nan, dtype=np.float32)
    linear(x, pack(weight), pad(bias), 1, 3, out)
    assert np.isnan(out[:, :16]).all()
    assert np.isnan(out[:, 48:]).all()
    linear(x, pack(weight), pad(bias), 0, 1, out)
    linear(x, pack(weight), pad(bias), 3, 5, out)
    assert np.array_equal(out, _apply(x, weight, bias))
