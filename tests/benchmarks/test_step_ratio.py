"""The compiled loop is worth having: a ratio in one process, far below what it is on idle cores."""

from __future__ import annotations

import pytest

from benchmarks.step_ratio import preset, ratio, times


@pytest.mark.parametrize(("batch", "least"), [(1, 3.0), (32, 1.2)])
def test_compiled_drawing_is_faster(batch: int, least: float) -> None:
    model = preset("default")
    found = [ratio(times(model, batch, steps=28, repeats=3))]
    # Once more where another process has come between.
    if found[0] < least:
        found.append(ratio(times(model, batch, steps=28, repeats=9)))
    assert max(found) > least, found
