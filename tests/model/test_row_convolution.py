from __future__ import annotations

import pytest
import torch

from imagegen.core.errors import UserError
from imagegen.model.row_convolution import RowConvolution, RowState

SHAPES = [(5, 2, 2), (5, 1, 0), (4, 0, 3), (3, 2, 7), (1, 2, 1)]


def _reference(module: RowConvolution, x: torch.Tensor) -> torch.Tensor:
    """Tap by tap, position by position."""
    y = module.bias.expand(*x.shape).clone()
    length = module.row_length
    for position in range(x.shape[1]):
        row, column = divmod(position, length)
        for up in range(module.rows + 1):
            for side in range(-module.columns, module.columns + 1):
                beyond = up == 0 and side > 0
                if beyond or row < up or not 0 <= column + side < length:
                    continue
                weight = module.weight[:, module.rows - up, module.columns + side]
                y[:, position] += weight * x[:, position - up * length + side]
    return y


@pytest.mark.parametrize(("row_length", "rows", "columns"), SHAPES)
def test_all_forms_are_the_reference(row_length: int, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    module = RowConvolution(6, row_length, rows, columns).double()
    x = torch.randn(2, 4 * row_length + 2, 6, dtype=torch.float64, requires_grad=True)
    expected = _reference(module, x)
    y, _ = module(x)
    torch.testing.assert_close(y, expected)
    weight = torch.randn_like(y)
    for got, wanted in zip(
        torch.autograd.grad((y * weight).sum(), [x, *module.parameters()]),
        torch.autograd.grad((expected * weight).sum(), [x, *module.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)
    with torch.no_grad():
        for split in range(x.shape[1] + 1):
            state: RowState | None = None
            if split:
                first, state = module(x[:, :split])
                torch.testing.assert_close(first, expected[:, :split])
            state = state or module.initial_state(2)
            assert state.recent.shape[1] == module.lookback
            if split < x.shape[1]:
                rest, _ = module(x[:, split:], state.clone())
                torch.testing.assert_close(rest, expected[:, split:])
            for position in range(split, x.shape[1]):
                y, state = module.step(x[:, position], state)
                torch.testing.assert_close(y, expected[:, position])


@torch.no_grad()
def test_no_output_sees_a_later_input() -> None:
    module = RowConvolution(6, 5, 2, 2)
    x = torch.randn(2, 23, 6)
    expected, _ = module(x)
    for position in range(23):
        changed = x.clone()
        changed[:, position:] += 100
        y, _ = module(changed)
        assert torch.equal(y[:, :position], expected[:, :position])
        assert not torch.equal(y[:, position], expected[:, position])


@pytest.mark.parametrize("reach", [(-1, 2), (1, -1), (0, 0)])
def test_impossible_kernels_are_refused(reach: tuple[int, int]) -> None:
    with pytest.raises(UserError, match=r"must be \[rows, columns\]"):
        RowConvolution(6, 5, *reach)
