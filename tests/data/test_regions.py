"""Regions: what a word keeps of an image, and which words are refused."""

from __future__ import annotations

import numpy as np
import pytest

from imagegen.core.errors import UserError
from imagegen.data.regions import as_visible, describe, read_region, read_rows

HEIGHT, WIDTH = 6, 9


def _visible(typed: object, **options: int) -> np.ndarray:
    return read_region(typed).visible(HEIGHT, WIDTH, **options)


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (0.5, np.s_[:3]),
        (0, np.s_[:0]),
        (0.99, np.s_[:5]),
        ("top:0.5", np.s_[:3]),
        ("bottom:0.3", np.s_[4:]),
        ("left:0.5", np.s_[:, :5]),
        ("left:0", np.s_[:0]),
        ("right:0.4", np.s_[:, 5:]),
        ("right:0.999", np.s_[:, 1:]),
    ],
)
def test_sides_are_kept(typed: object, kept: tuple[slice, ...]) -> None:
    expected = np.zeros((HEIGHT, WIDTH), dtype=bool)
    expected[kept] = True
    np.testing.assert_array_equal(_visible(typed), expected)


@pytest.mark.parametrize(
    ("typed", "drawn"),
    [
        ("hole:0.33", np.s_[2:4, 3:6]),
        ("hole:0.01", np.s_[2:3, 4:5]),
        ("rectangle:[1,2,3,4]", np.s_[1:4, 2:6]),
        ("rectangle:[0, 0, 6, 8]", np.s_[:, :8]),
        ("rectangle:5,8,1,1", np.s_[5:, 8:]),
    ],
)
def test_holes_are_drawn(typed: str, drawn: tuple[slice, ...]) -> None:
    expected = np.ones((HEIGHT, WIDTH), dtype=bool)
    expected[drawn] = False
    np.testing.assert_array_equal(_visible(typed), expected)


def test_pixels_at_random_belong_to_an_image_of_a_seed() -> None:
    regions = [_visible("random:0.3", seed=3, image=image) for image in range(20)]
    assert {int(region.sum()) for region in regions} == {16}
    assert len({region.tobytes() for region in regions}) == 20
    np.testing.assert_array_equal(regions[7], _visible("random:0.3", seed=3, image=7))
    assert (regions[7] != _visible("random:0.3", seed=2**64 - 1, image=7)).any()
    # Every pixel is kept as often as every other.
    many = np.mean([_visible("random:0.3", seed=1, image=image) for image in range(2000)], axis=0)
    assert np.abs(many - 16 / 54).max() < 0.05
    # As ever: a job that is resumed with another version has to find the same pixels.
    first = _visible("random:0.3", seed=0, image=0)
    assert np.flatnonzero(first).tolist() == PIXELS
    assert _visible("random:0.999").sum() == HEIGHT * WIDTH - 1


PIXELS = [1, 2, 8, 9, 11, 15, 21, 22, 26, 27, 31, 36, 40, 42, 44, 47]


@pytest.mark.parametrize("shape", [(28, 28), (6, 9), (1, 7), (2, 1)])
def test_strokes_leave_something_and_draw_something(shape: tuple[int, int]) -> None:
    region = read_region("strokes")
    shares = []
    for image in range(30):
        visible = region.visible(*shape, seed=1, image=image)
        assert visible.any()
        assert not visible.all()
        np.testing.assert_array_equal(visible, region.visible(*shape, seed=1, image=image))
        shares.append(visible.mean())
    if shape == (28, 28):
        assert 0.7 < np.mean(shares) < 0.95


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("up:0.5", "visible=up:0.5, but it must be a share of the rows, top:, bottom:"),
        ("half", "visible=half, but it must be a share of the rows"),
        ("strokes:3", "visible=strokes:3, but it must be"),
        (True, "visible=true, but it must be a share of the rows"),
        (None, "visible=null, but it must be a share of the rows"),
        ("left", "visible=left, but left: takes the share that is kept, from 0"),
        ("left:1", "visible=left:1, but left: takes the share"),
        ("random:nan", "visible=random:nan, but random: takes the share"),
        ("top:-0.1", "visible=top:-0.1, but top: takes the share"),
        ("hole:0", "visible=hole:0, but hole: takes the share of each side that is drawn"),
        ("hole:1", "visible=hole:1, but hole: takes the share of each side that is drawn"),
        ("rectangle", "visible=rectangle, but rectangle: takes the first row and column"),
        ("rectangle:[1,2,3]", r"visible=rectangle:\[1,2,3\], but rectangle: takes the first row"),
        ("rectangle:[1,2,0,3]", "but rectangle: takes the first row and column"),
        ("rectangle:[1,2,-1,3]", "but rectangle: takes the first row and column"),
        ("rectangle:[3,2,4,3]", "ends at row 7 and column 5, but the images have 6x9 pixels"),
    ],
)
def test_other_words_are_refused(typed: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as refusal:
        _visible(typed)
    assert "\n" not in str(refusal.value)


def test_rows() -> None:
    assert read_rows(2.0).visible(HEIGHT, WIDTH).sum() == 2 * WIDTH
    with pytest.raises(UserError, match=r"visible_rows=6, but it must be .* from 0 to 5"):
        read_rows(6).visible(HEIGHT, WIDTH)
    with pytest.raises(UserError, match="visible_rows=half"):
        read_rows("half")


def test_visible_pixels_of_several_images() -> None:
    expected = np.zeros((2, HEIGHT, WIDTH), dtype=bool)
    expected[0, :2] = True
    np.testing.assert_array_equal(as_visible([2, 0], 2, HEIGHT, WIDTH), expected)
    assert as_visible(expected, 2, HEIGHT, WIDTH) is expected
    with pytest.raises(UserError, match=r"has the shape \(2, 6, 9\), but it must be .*\(3, 6, 9\)"):
        as_visible(expected, 3, HEIGHT, WIDTH)
    with pytest.raises(UserError, match="visible_rows=7 must be between 0 and the height, 6"):
        as_visible([7], 1, HEIGHT, WIDTH)


def test_a_rectangle_leaves_something() -> None:
    with pytest.raises(UserError, match=r"rectangle:\[0,0,6,9\] keeps nothing of the image"):
        read_region("rectangle:[0,0,6,9]").visible(6, 9)


def test_a_manifest_tells_regions_apart() -> None:
    left, other = describe(_visible("left:0.5")), describe(_visible("right:0.5"))
    assert left["kept"] == pytest.approx(5 / 9)
    assert left["region_sha256"] != other["region_sha256"]
