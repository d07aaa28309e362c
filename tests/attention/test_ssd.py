from __future__ import annotations

import pytest
import torch

from imagegen.attention.ssd import StateSpaceDuality
from imagegen.core.errors import UserError


def test_delta_and_a_start_in_their_ranges() -> None:
    torch.manual_seed(0)
    module = StateSpaceDuality(16, 1000, head_dim=1)
    delta = torch.nn.functional.softplus(module.delta_bias.double())
    assert 0.00099 < delta.min() < 0.0011
    assert 0.09 < delta.max() < 0.1001
    # Evenly in the logarithm: half of them are below the geometric mean.
    assert delta.median().item() == pytest.approx(0.01, rel=0.3)
    a = module.log_a.exp()
    assert 1 <= a.min() < 1.1
    assert 15.9 < a.max() <= 16.001


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"d_state": 0}, "d_state=0 must be at least 1"),
        ({"expand": 0.3}, "expand=0.3 times head_dim=8 makes 2.4 features"),
        ({"dt_min": 0.0}, "dt_min=0.0 must be above 0 and at most attention.dt_max=0.1"),
        ({"a_min": 20.0}, "a_min=20.0 must be above 0 and at most attention.a_max=16.0"),
    ],
)
def test_impossible_choices_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        StateSpaceDuality(16, 2, **options)


def test_companions_can_be_left_out() -> None:
    module = StateSpaceDuality(
        10, 4, head_dim=3, conv_size=0, skip=False, output_norm=False, output_gate=False
    )
    y, state = module(torch.randn(2, 5, 10))
    assert y.shape == (2, 5, 10)
    assert state.s.shape == (2, 4, 64, 6)
    assert state.conv.shape[1] == 0
