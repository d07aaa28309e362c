from __future__ import annotations

import pytest
import torch

from imagegen.model.block import Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_zeroes_a_share_and_scales_the_rest(p: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 401, dtype=torch.float64, requires_grad=True)
    y = Dropout(p)(x)
    zeros = (y == 0).double().mean().item()
    assert zeros == pytest.approx(p, abs=4 * (p * (1 - p) / x.numel()) ** 0.5)
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / (1 - p), rtol=1e-3, atol=0)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, y.detach() / x.detach())
    # Neither rows nor columns go together.
    assert kept.double().mean(0).std() < 3 * (p * (1 - p) / 50) ** 0.5
    assert kept.double().mean(1).std() < 3 * (p * (1 - p) / 401) ** 0.5


def test_depends_on_the_seed_alone() -> None:
    x, dropout = torch.ones(3, 1001), Dropout(0.3)

    def drawn(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [dropout(x), dropout(x)]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("p", [0.0, 1e-9, 1.0])
def test_none_and_all(p: float) -> None:
    x = torch.randn(4, 6)
    assert torch.equal(Dropout(p)(x), torch.zeros_like(x) if p == 1 else x)


def test_nothing_is_dropped_when_evaluating() -> None:
    x = torch.randn(4, 6)
    assert torch.equal(Dropout(0.9).eval()(x), x)


def test_other_types() -> None:
    x = torch.ones(9, 7, dtype=torch.bfloat16)
    y = Dropout(0.5)(x)
    assert y.dtype == x.dtype
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert Dropout(0.5)(torch.ones(0, 3)).shape == (0, 3)
