"""Many steps of every mechanism whose state keeps its size, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.stability import (
    LAST,
    PRECISIONS,
    STEPS,
    TOLERANCES,
    Errors,
    Result,
    cases,
    measure,
)

CASES = dict(cases())


def test_every_mechanism_of_constant_state_is_among_them() -> None:
    linear = {name for name in CASES if name.startswith("linear ")}
    assert len(linear) == 7
    others = {
        "delta",
        "gated_delta head",
        "gated_delta channel",
        "gla",
        "local",
        "retention",
        "ssd",
    }
    assert others <= set(CASES)
    assert not {"softmax", "lsh", "strided"} & set(CASES)


def _assert_close_to_float64(name: str, precision: str, steps: int, last: int) -> None:
    result = measure(CASES[name], steps, precision, last)
    assert result.meets(TOLERANCES[precision]), result
    assert result.output_rms > 0.01


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_hundreds_of_steps_stay_with_float64(name: str, precision: str) -> None:
    _assert_close_to_float64(name, precision, steps=400, last=100)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_tens_of_thousands_of_steps_stay_with_float64(name: str, precision: str) -> None:
    _assert_close_to_float64(name, precision, STEPS, LAST)


def test_a_drift_is_noticed() -> None:
    tolerance = TOLERANCES["float32"]
    small = Errors(rms=1e-7, rms_of_last=1e-7, largest=1e-6)
    good = Result(small, small, output_rms=1.0, output_largest=2.0, finite=True)
    assert good.meets(tolerance)
    assert not replace(good, finite=False).meets(tolerance)
    drifting = replace(small, rms_of_last=2 * tolerance.rms)
    assert not replace(good, steps=drifting).meets(tolerance)
    assert not replace(good, parallel=replace(small, largest=float("nan"))).meets(tolerance)
