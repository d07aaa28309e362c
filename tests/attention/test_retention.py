from __future__ import annotations

import pytest
import torch

from imagegen.attention.retention import Retention, rotated
from imagegen.core.errors import UserError


@torch.no_grad()
def test_rotation_depends_on_distance_only_and_is_exact_far_away() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    near = (rotated(q, 5) * rotated(k, 2)).sum()
    far = (rotated(q, 100_005) * rotated(k, 100_002)).sum()
    torch.testing.assert_close(far, near, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotated(q, 0), q)


@torch.no_grad()
@pytest.mark.parametrize("output_norm", [True, False])
def test_the_papers_other_normalisations_cancel_in_the_output_norm_alone(output_norm: bool) -> None:
    # "Retention Score Normalization", section 2.2 of the paper, as it is written.
    torch.manual_seed(0)
    module = Retention(16, 2, output_norm=output_norm, norm_eps=1e-12).double()
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    q, k, v, log_decay, *_ = module._inputs(x, module.initial_state(1))
    distance = torch.arange(20).unsqueeze(-1) - torch.arange(20)
    d = (log_decay[:, :, :1] * distance).exp().tril()
    r = (q @ k.mT) * d / d.sum(dim=-1, keepdim=True).sqrt()
    r = r / r.sum(dim=-1, keepdim=True).abs().clamp(min=1)
    same = torch.allclose(module._output(r @ v, x), module(x)[0], rtol=1e-6, atol=1e-6)
    assert same == output_norm


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
