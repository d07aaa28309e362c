"""The regions of training: of every kind, never all of an image, the same for a seed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from imagegen.data.random_regions import random_regions

CPU = torch.device("cpu")


def _regions(count: int, height: int, width: int, whole: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return random_regions(count, height, width, whole, CPU, generator)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 9), (7, 1), (3, 2), (28, 28), (5, 40)])
def test_something_is_always_missing(height: int, width: int) -> None:
    visible = _regions(2_000, height, width, 0.0)
    assert visible.shape == (2_000, height, width)
    assert not visible.flatten(1).all(dim=1).any()
    if height * width > 1:
        # Each pixel is visible in some and missing in others.
        share = visible.double().mean(dim=0)
        assert 0.2 < share.min() <= share.max() < 0.8


def test_nothing_is_visible_in_a_share_of_them() -> None:
    for whole in (0.0, 0.25, 1.0):
        nothing = ~_regions(4_000, 16, 16, whole).flatten(1).any(dim=1)
        # From a side, a share below one row shows nothing either: 1/16 of half of them.
        expected = whole + (1 - whole) / 32
        assert nothing.double().mean().item() == pytest.approx(expected, abs=0.03)


def test_there_are_regions_of_every_kind() -> None:
    visible = _regions(4_000, 16, 16, 0.0)
    ordinary = visible[visible.flatten(1).any(dim=1)]
    rows, columns = ordinary.any(dim=2), ordinary.any(dim=1)
    full_rows, full_columns = ordinary.all(dim=2), ordinary.all(dim=1)
    by_rows, by_columns = (rows == full_rows).all(1), (columns == full_columns).all(1)
    sides = {
        "top": by_rows & full_rows[:, 0],
        "bottom": by_rows & full_rows[:, -1],
        "left": by_columns & full_columns[:, 0],
        "right": by_columns & full_columns[:, -1],
    }
    for name, found in sides.items():
        assert 0.09 < found.double().mean() < 0.16, name
    size = ordinary.sum(dim=(1, 2))
    box = rows.sum(dim=1) * columns.sum(dim=1)
    alone = (size == box) & ~(by_rows | by_columns)
    hidden = ~ordinary
    hole = hidden.sum(dim=(1, 2)) == hidden.any(dim=2).sum(1) * hidden.any(dim=1).sum(1)
    hole &= ~(by_rows | by_columns)
    for name, found in {"rectangle": alone, "hole": hole}.items():
        assert 0.07 < found.double().mean() < 0.16, name
    other = ordinary[~(by_rows | by_columns | alone | hole)]
    # Under a brush, hidden pixels hang together; scattered ones do not.
    lone = ~other
    touching = torch.zeros_like(lone)
    touching[:, 1:] |= lone[:, :-1]
    touching[:, :-1] |= lone[:, 1:]
    touching[:, :, 1:] |= lone[:, :, :-1]
    touching[:, :, :-1] |= lone[:, :, 1:]
    together = (~lone | touching).flatten(1).all(dim=1)
    assert 0.3 < together.double().mean() < 0.75


def test_they_depend_on_the_seed_alone() -> None:
    assert torch.equal(_regions(50, 9, 8, 0.25, 3), _regions(50, 9, 8, 0.25, 3))
    assert not torch.equal(_regions(50, 9, 8, 0.25, 3), _regions(50, 9, 8, 0.25, 4))
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(random_regions(50, 9, 8, 0.25, CPU))
    assert torch.equal(*found)
