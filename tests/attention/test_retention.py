from __future__ import annotations

import pytest
import torch

from imagegen.attention.retention import Retention, rotated
from imagegen.errors import UserError


@torch.no_grad()
def test_rotation_depends_on_distance_only_and_is_exact_far_away() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    near = (rotated(q, 5) * rotated(k, 2)).sum()
    far = (rotated(q, 100_005) * rotated(k, 100_002)).sum()
    torch.testing.assert_close(far, near, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotated(q, 0), q)


@torch.no_grad()
def test_normalising_the_scores_would_change_nothing() -> None:
    # Section 2.3 of the paper: the group norm does not see the scale of its input.
    torch.manual_seed(0)
    module = Retention(16, 2, norm_eps=1e-12).double()
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    expected, _ = module(x)
    keys = module.n_heads * module.key_dim
    module.qkv.weight[:keys] *= 1000
    torch.testing.assert_close(module(x)[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"head_dim": 5}, "head_dim=5 must be even for attention.rotary=true"),
        ({"head_dim": 6, "expand_v": 0.75}, "expand_v=0.75 times head_dim=6 makes 4.5 features"),
        ({"head_dim": 6, "expand_v": 0}, "expand_v=0 times head_dim=6 makes 0 features"),
    ],
)
def test_impossible_choices_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Retention(16, 2, **options)


def test_head_dim_may_be_odd_without_rotation_and_differ_from_the_width() -> None:
    module = Retention(10, 4, head_dim=3, rotary=False, output_norm=False, output_gate=False)
    y, state = module(torch.randn(2, 5, 10))
    assert y.shape == (2, 5, 10)
    assert state.s.shape == (2, 4, 3, 6)
