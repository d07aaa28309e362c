from __future__ import annotations

import numpy as np
import pytest

from imagegen.core.compiled import load

state = load("imagegen.core.compiled.state")
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("width", [8, 32, 40, 72])
def test_every_column_is_updated_and_read(width: int) -> None:
    s, decay, k, q, v = (
        RNG.standard_normal(shape).astype(np.float32) for shape in ((5, width), 5, 5, 5, width)
    )
    new = np.outer(k, v)
    for expected, change in (
        (s, lambda found, out: state.read(found, q, out)),
        (s + new, lambda found, out: state.add_and_read(found, k, v, q, out)),
        (
            decay[:, None] * s + new,
            lambda found, out: state.update_and_read(found, decay, k, v, q, out),
        ),
    ):
        found, out = s.copy(), np.full(width, np.nan, dtype=np.float32)
        change(found, out)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        np.testing.assert_allclose(out, q @ expected, atol=1e-5)
