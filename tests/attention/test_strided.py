from __future__ import annotations

from typing import Any

import pytest
import torch

from imagegen.attention.strided import StridedAttention
from imagegen.core.errors import UserError
from tests.reference.strided import reference

STRIDE = 5


def _changes(module: StridedAttention, position: int, length: int = 23) -> set[int]:
    """The outputs that depend on the input at `position`."""
    x = torch.randn(1, length, module.d_model, dtype=torch.float64)
    changed = x.clone()
    changed[:, position] += 1
    difference = (module(x)[0] - module(changed)[0]).abs().amax(dim=(0, 2))
    return set(difference.nonzero().flatten().tolist())


@torch.no_grad()
def test_each_pattern_sees_what_it_should() -> None:
    row = {7, 8, 9, 10, 11, 12}
    column = {7, 12, 17, 22}
    for options, seen in (
        ({"combine": "heads"}, row | column),
        ({"combine": "merged"}, row | column),
        ({"combine": "interleaved", "layer": 2}, row),
        ({"combine": "interleaved", "layer": 3}, column),
    ):
        module = StridedAttention(8, 2, row_length=STRIDE, **options).double()
        assert _changes(module, 7) == seen


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 1])
def test_interleaved_layers_keep_the_contract(layer: int) -> None:
    module = StridedAttention(8, 2, combine="interleaved", stride=STRIDE, layer=layer).double()
    x = torch.randn(2, 33, 8, dtype=torch.float64)
    expected = reference(module, x)
    torch.testing.assert_close(module(x)[0], expected, rtol=1e-10, atol=1e-10)
    for split in range(34):
        state = module.initial_state(2) if split == 0 else module(x[:, :split])[1]
        for position in range(split, min(33, split + 7)):
            y, state = module.step(x[:, position], state)
            torch.testing.assert_close(y, expected[:, position], rtol=1e-10, atol=1e-10)
        if position < 32:
            y, _ = module(x[:, position + 1 :], state)
            torch.testing.assert_close(y, expected[:, position + 1 :], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_only_heads_that_see_columns_keep_the_history() -> None:
    def sizes(**options: Any) -> tuple[int, int]:
        module = StridedAttention(8, 4, row_length=STRIDE, **options)
        _, state = module(torch.randn(1, 100, 8))
        return state.window_keys.shape[1:3].numel(), state.column_keys.shape[1:3].numel()

    assert sizes(combine="heads") == (2 * 6, 2 * 100)
    assert sizes(combine="merged") == (0, 4 * 100)
    assert sizes(combine="interleaved", layer=0) == (4 * 6, 0)
    assert sizes(combine="interleaved", layer=1) == (0, 4 * 100)


def test_the_stride_is_the_row_unless_it_is_given() -> None:
    assert StridedAttention(8, 2, row_length=28).stride == 28
    assert StridedAttention(8, 2, row_length=28, stride=3).stride == 3
    assert StridedAttention(8, 2).stride == 128


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"combine": "mergedd"}, "choose one of heads, merged, interleaved"),
        ({"n_heads": 1}, "attention.combine=heads .* at least 2, not 1"),
        ({"stride": 0}, "attention.stride=0 must be at least 1"),
    ],
)
def test_impossible_choices_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        StridedAttention(**{"d_model": 8, "n_heads": 2, **options})
