"""Levels and display values, PNG files, and grids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from imagegen.core.errors import UserError
from imagegen.generation.images import (
    HIDDEN_VALUE,
    PADDING_VALUE,
    enlargement,
    from_display,
    grid_limit,
    make_completion_grid,
    make_grid,
    save_png,
    square_columns,
    to_display,
)


def random_images(n: int, h: int, w: int, c: int, levels: int = 256) -> np.ndarray:
    return np.random.default_rng(0).integers(0, levels, (n, h, w, c)).astype(np.uint8)


@given(st.integers(2, 256))
def test_display_is_linear_and_comes_back(levels: int) -> None:
    every = np.arange(levels, dtype=np.uint8)
    shown = to_display(every, levels)
    assert shown[0] == 0
    assert shown[-1] == 255
    assert np.abs(shown - np.arange(levels) * 255 / (levels - 1)).max() <= 0.5
    np.testing.assert_array_equal(from_display(shown, levels), every)


@given(st.integers(2, 256))
def test_every_value_is_read_as_the_nearest_level(levels: int) -> None:
    values = np.arange(256, dtype=np.uint8)
    level = from_display(values, levels)
    exact = np.arange(256) * (levels - 1) / 255
    assert np.abs(level - exact).max() <= 0.5 + 1e-12
    assert level.max() == levels - 1


def test_256_levels_are_left_alone() -> None:
    values = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(to_display(values, 256), values)
    np.testing.assert_array_equal(from_display(values, 256), values)


def test_the_seventeen_levels_of_digits() -> None:
    shown = to_display(np.array([0, 1, 8, 15, 16], dtype=np.uint8), 17)
    np.testing.assert_array_equal(shown, [0, 16, 128, 239, 255])


def test_what_is_no_level_is_refused() -> None:
    with pytest.raises(ValueError, match="level 17 is outside 0 to 16"):
        to_display(np.array([3, 17], dtype=np.uint8), 17)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_png_is_exact(tmp_path: Path, channels: int, mode: str) -> None:
    image = random_images(1, 5, 7, channels)[0]
    save_png(tmp_path / "image.png", image)
    with Image.open(tmp_path / "image.png") as read:
        assert read.mode == mode
        np.testing.assert_array_equal(np.array(read).reshape(image.shape), image)
    assert [path.name for path in tmp_path.iterdir()] == ["image.png"]


def test_other_channels_are_refused_as_png(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="5 channels cannot be written as PNG"):
        save_png(tmp_path / "image.png", random_images(1, 2, 2, 5)[0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("height", "width", "factor"),
    [(8, 8, 4), (28, 28, 2), (32, 32, 1), (100, 100, 1), (24, 40, 2), (1, 512, 1), (1, 1, 32)],
)
def test_small_images_are_enlarged_by_whole_numbers(height: int, width: int, factor: int) -> None:
    assert enlargement(height, width, 32) == factor


@pytest.mark.parametrize(
    ("n", "height", "width", "columns"),
    [(1, 8, 8, 1), (4, 8, 8, 2), (5, 8, 8, 3), (64, 28, 28, 8), (8, 10, 20, 2), (3, 100, 1, 3)],
)
def test_grids_are_about_square(n: int, height: int, width: int, columns: int) -> None:
    assert square_columns(n, height, width) == columns


@pytest.mark.parametrize(("channels", "factor"), [(1, 1), (3, 4)])
def test_grid_holds_each_pixel_as_a_block(channels: int, factor: int) -> None:
    images = random_images(5, 6, 8, channels)
    grid = make_grid(images, columns=3, padding=2, min_side=6 * factor)
    tile_h, tile_w = 6 * factor, 8 * factor
    assert grid.shape == (2 * (tile_h + 2) + 2, 3 * (tile_w + 2) + 2, channels)
    rest = np.ones(grid.shape[:2], dtype=bool)
    for i, image in enumerate(images):
        top, left = (i // 3) * (tile_h + 2) + 2, (i % 3) * (tile_w + 2) + 2
        tile = grid[top : top + tile_h, left : left + tile_w]
        blocks = tile.reshape(6, factor, 8, factor, channels)
        assert (blocks == image[:, None, :, None]).all()
        rest[top : top + tile_h, left : left + tile_w] = False
    assert (grid[rest] == PADDING_VALUE).all()


def test_grid_has_no_more_columns_than_images() -> None:
    assert make_grid(random_images(2, 4, 4, 1), columns=9, padding=0, min_side=1).shape == (4, 8, 1)


def test_grid_of_nothing_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="at least one image"):
        make_grid(np.empty((0, 4, 4, 1), dtype=np.uint8))


def test_grids_stay_small_enough_to_open() -> None:
    assert grid_limit(28, 28) == 256
    assert grid_limit(1024, 1024) == 16
    assert grid_limit(8192, 8192) == 1


def test_completion_grid_shows_original_masked_and_completions() -> None:
    originals = random_images(2, 4, 3, 1)
    completions = random_images(6, 4, 3, 1).reshape(2, 3, 4, 3, 1)
    grid = make_completion_grid(originals, completions, [1, 0], padding=0, min_side=1)
    rows = grid.reshape(2, 4, 5, 3, 1).swapaxes(1, 2)
    for i, visible in enumerate([1, 0]):
        np.testing.assert_array_equal(rows[i, 0], originals[i])
        np.testing.assert_array_equal(rows[i, 1, :visible], originals[i, :visible])
        assert (rows[i, 1, visible:] == HIDDEN_VALUE).all()
        np.testing.assert_array_equal(rows[i, 2:], completions[i])
