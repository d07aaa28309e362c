"""Products of whole numbers: exact sums of rounded numbers, close to those of float64."""

from __future__ import annotations

import numpy as np
import pytest

from imagegen.generation.decode.integer import LARGEST, pack_integers, quantize
from imagegen.generation.decode.matmul import PANEL
from imagegen.generation.decode.matrix import matrix, multiply, round_rows

RNG = np.random.default_rng(0)
BITS = [32, 16, 8]


def _apply(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, bits: int) -> np.ndarray:
    m = matrix([weight], [bias], bits)
    inputs = x.shape[1]
    whole = RNG.integers(-5, 5, (len(x), inputs + 9)).astype(np.int16)
    steps = np.zeros(len(x), dtype=np.float32)
    out = np.full((len(x), m.width), np.nan, dtype=np.float32)
    round_rows(x, inputs, m.bits, whole, steps, 0, len(x))
    multiply(x, whole, steps, m, 0, 0, m.width // PANEL, out, 0)
    return out


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (5, 16), (32, 30), (66, 33), (7, 100)])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 13])
def test_product(rows: int, inputs: int, outputs: int, bits: int) -> None:
    weight = RNG.standard_normal((outputs, inputs)).astype(np.float32)
    bias = RNG.standard_normal(outputs).astype(np.float32)
    x = RNG.standard_normal((rows, inputs)).astype(np.float32)
    out = _apply(x, weight, bias, bits)
    expected = x.astype(np.float64) @ weight.T + bias
    tolerance = {32: 1e-5, 16: 4e-3, 8: 8e-2}[bits] * np.sqrt(inputs)
    np.testing.assert_allclose(out[:, :outputs], expected, rtol=0, atol=tolerance)
    assert not out[:, outputs:].any()


@pytest.mark.parametrize("bits", [16, 8])
def test_sums_are_those_of_the_whole_numbers(bits: int) -> None:
    weight = RNG.standard_normal((16, 50)).astype(np.float32)
    x = RNG.standard_normal((3, 50)).astype(np.float32)
    whole, steps = np.zeros((3, 60), dtype=np.int16), np.zeros(3, dtype=np.float32)
    quantize(x, 50, whole, steps, 0, 3)
    assert np.abs(whole[:, :50]).max() == LARGEST
    assert np.abs(x - whole[:, :50] * steps[:, None]).max() <= steps.max() * 0.51
    packed, weight_steps = pack_integers(weight, bits)
    pairs = packed.shape[1]
    whole_weights = packed.transpose(0, 2, 1, 3).reshape(16, 2 * pairs)[:, :50]
    error = np.abs(weight - whole_weights * weight_steps[:, None])
    assert (error <= weight_steps[:, None] * 0.51).all()
    sums = whole[:, :50].astype(np.int64) @ whole_weights.T.astype(np.int64)
    expected = sums * weight_steps * steps[:, None].astype(np.float64)
    out = _apply(x, weight, np.zeros(16, dtype=np.float32), bits)
    np.testing.assert_allclose(out, expected, rtol=3e-7)


@pytest.mark.parametrize("bits", [16, 8])
def test_the_largest_sums_do_not_overflow(bits: int) -> None:
    for inputs in (2, 4, 256, 1024, 4096):
        x = np.ones((1, inputs), dtype=np.float32)
        for weight in (np.ones((16, inputs)), np.linspace(0.01, 1, 16 * inputs)):
            w = weight.reshape(16, inputs).astype(np.float32)
            out = _apply(x, w, np.zeros(16, dtype=np.float32), bits)
            np.testing.assert_allclose(out[0], w.astype(np.float64).sum(1), rtol=5e-3)


@pytest.mark.parametrize("bits", BITS)
def test_a_row_does_not_depend_on_its_company(bits: int) -> None:
    weight = RNG.standard_normal((48, 200)).astype(np.float32)
    bias = RNG.standard_normal(48).astype(np.float32)
    x = RNG.standard_normal((29, 200)).astype(np.float32)
    expected = _apply(x, weight, bias, bits)
    for first, last in ((0, 1), (3, 5), (0, 6), (5, 18), (28, 29)):
        assert np.array_equal(
            _apply(x[first:last].copy(), weight, bias, bits), expected[first:last]
        )


def test_rows_that_are_no_numbers_stay_so() -> None:
    x = RNG.standard_normal((4, 20)).astype(np.float32)
    x[0, 3], x[1, 4], x[2] = np.nan, np.inf, 0.0
    out = _apply(x, np.ones((16, 20), dtype=np.float32), np.ones(16, dtype=np.float32), 16)
    assert np.isnan(out[:2]).all()
    assert (out[2] == 1).all()
    assert np.isfinite(out[3]).all()
