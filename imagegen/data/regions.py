"""Which pixels of an image are kept and which are drawn, from the word that a user types.

Axes: `n` image, `h` row, `w` column.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from imagegen.core import values as opt
from imagegen.core.errors import UserError

SIDES = ("top", "bottom", "left", "right")
_KNOWN = (
    "a share of the rows, top:, bottom:, left: or right: with the share that is kept, hole: with "
    "the share of each side that is drawn, rectangle:[top,left,height,width] in pixels, random: "
    "with the share of the pixels that is kept, or strokes"
)
# Of the Philox counter: images are drawn from numbers whose third word is 0.
_STREAM = [0, 0, 1, 0]
STROKES, TURNS = 3, 4
"""Brush strokes of an image, and the straight pieces of each."""


@dataclass(frozen=True)
class Region:
    """A part of an image.

    Attributes:
        kind: rows, one of `SIDES`, hole, rectangle, random or strokes.
        numbers: of the kind: rows, a share, or the four of a rectangle.
        typed: the word, as it was typed.
    """

    kind: str
    numbers: tuple[float, ...]
    typed: str

    @property
    def in_rows(self) -> bool:
        """Whether a number of rows or a share of them was typed, and no word."""
        return not self.typed[0].isalpha()

    def visible(
        self, height: int, width: int, seed: int = 0, image: int = 0
    ) -> Bool[np.ndarray, "h w"]:
        """The pixels that are kept; at least one is not.

        A share is rounded to the nearest number of rows, columns or pixels that leaves one to draw.

        Args:
            seed, image: of what is left to chance; it does not depend on other images.

        Raises:
            UserError: where the image has no such region.
        """
        visible = np.zeros((height, width), dtype=bool)
        if self.kind == "rows":
            rows = opt.whole_number(self.numbers[0], "visible_rows", 0, height - 1)
            visible[:rows] = True
        elif self.kind in SIDES:
            _keep_side(visible, self.kind, self.numbers[0])
        elif self.kind == "hole":
            sides = [max(1, _rounded(self.numbers[0], side)) for side in (height, width)]
            top, left = (height - sides[0]) // 2, (width - sides[1]) // 2
            visible[:] = True
            visible[top : top + sides[0], left : left + sides[1]] = False
        elif self.kind == "rectangle":
            self._draw_rectangle(visible)
        elif self.kind == "random":
            count = min(_rounded(self.numbers[0], visible.size), visible.size - 1)
            order = _numbers(seed, image, visible.size).argsort(kind="stable")
            visible.flat[order[:count]] = True
        else:
            visible = ~_strokes(height, width, seed, image)
        return visible

    def _draw_rectangle(self, visible: Bool[np.ndarray, "h w"]) -> None:
        top, left, rows, columns = (int(number) for number in self.numbers)
        height, width = visible.shape
        if top + rows > height or left + columns > width:
            raise UserError(
                f"visible={self.typed} ends at row {top + rows} and column {left + columns}, but "
                f"the images have {height}x{width} pixels (height x width)."
            )
        if (rows, columns) == (height, width):
            raise UserError(
                f"visible={self.typed} keeps nothing of the image; name a smaller rectangle, or "
                "visible=0 to draw all of it."
            )
        visible[:] = True
        visible[top : top + rows, left : left + columns] = False


def read_region(value: object) -> Region:
    """What was typed as `visible=`: a share of the rows, or one of the words in `Region`.

    Raises:
        UserError: for anything else, and for numbers that no image could have.
    """
    if not isinstance(value, str):
        return Region("top", (opt.share(value, "visible"),), opt.as_typed(value))
    kind, _, rest = value.strip().partition(":")
    if kind in SIDES or kind in ("hole", "random"):
        share = _share(kind, rest, value)
        return Region(kind, (share,), value.strip())
    if kind == "rectangle":
        return Region(kind, _rectangle(rest, value), value.strip())
    if kind == "strokes" and not rest:
        return Region(kind, (), kind)
    raise UserError(f"visible={value}, but it must be {_KNOWN}.")


def read_rows(value: object) -> Region:
    """What was typed as `visible_rows=`.

    Raises:
        UserError: for anything but a whole number.
    """
    rows = opt.whole_number(value, "visible_rows", 0)
    return Region("rows", (rows,), str(rows))


def as_visible(
    visible: Bool[np.ndarray, "..."] | Sequence[int], n: int, height: int, width: int
) -> Bool[np.ndarray, "n h w"]:
    """The pixels that are kept of `n` images, from themselves or from numbers of first rows.

    Raises:
        UserError: for another number of images, another size, or rows that no image has.
    """
    if isinstance(visible, np.ndarray) and visible.dtype == bool:
        if visible.shape != (n, height, width):
            raise UserError(
                f"visible has the shape {visible.shape}, but it must be that of the images' "
                f"pixels, {(n, height, width)}."
            )
        return visible
    if len(visible) != n:
        raise UserError(f"visible rows are given for {len(visible)} of {n} images.")
    for rows in visible:
        if not 0 <= rows <= height:
            raise UserError(f"visible_rows={rows} must be between 0 and the height, {height}.")
    kept = np.arange(height) < np.asarray(visible, dtype=np.int64).reshape(n, 1)
    return np.repeat(kept[:, :, None], width, axis=2)


def _share(kind: str, text: str, typed: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if kind == "hole" and not 0 < share < 1:
        raise UserError(
            f"visible={typed}, but hole: takes the share of each side that is drawn, between 0 and "
            "1, such as hole:0.4."
        )
    if not 0 <= share < 1:
        raise UserError(
            f"visible={typed}, but {kind}: takes the share that is kept, from 0 (nothing) to below "
            f"1, such as {kind}:0.5."
        )
    return share


def _rectangle(text: str, typed: str) -> tuple[float, ...]:
    match = re.fullmatch(r"\[?\s*" + r"\s*,\s*".join([r"(\d{1,6})"] * 4) + r"\s*\]?", text)
    numbers = () if match is None else tuple(int(number) for number in match.groups())
    if len(numbers) != 4 or not numbers[2] or not numbers[3]:
        raise UserError(
            f"visible={typed}, but rectangle: takes the first row and column, the height and the "
            "width of what is drawn, such as rectangle:[8,8,12,12]."
        )
    return numbers


def _rounded(share: float, count: int) -> int:
    return int(share * count + 0.5)


def _keep_side(visible: Bool[np.ndarray, "h w"], side: str, share: float) -> None:
    lines = visible if side in ("top", "bottom") else visible.T
    kept = min(_rounded(share, len(lines)), len(lines) - 1)
    if side in ("top", "left"):
        lines[:kept] = True
    else:
        lines[len(lines) - kept :] = True


def _numbers(seed: int, image: int, count: int) -> Float[np.ndarray, " count"]:
    """Uniform numbers in [0, 1) of one image, the same with every version of numpy."""
    key = np.array([seed, image], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=_STREAM).random_raw(count)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _strokes(height: int, width: int, seed: int, image: int) -> Bool[np.ndarray, "h w"]:
    """Pixels under brush strokes: `STROKES` lines of `TURNS` straight pieces that bend gently."""
    numbers = _numbers(seed, image, STROKES * (3 + 2 * TURNS)).reshape(STROKES, -1)
    side = min(height, width)
    rows, columns = np.mgrid[:height, :width]
    drawn = np.zeros((height, width), dtype=bool)
    for stroke in numbers:
        y, x = stroke[0] * (height - 1), stroke[1] * (width - 1)
        angle = 2 * math.pi * stroke[2]
        for bend, reach in stroke[3:].reshape(TURNS, 2):
            angle += (bend - 0.5) * math.pi / 2
            length = side * (0.1 + 0.15 * reach)
            for step in np.linspace(0, length, math.ceil(2 * length) + 1):
                at_y, at_x = y + step * math.sin(angle), x + step * math.cos(angle)
                drawn |= (rows - at_y) ** 2 + (columns - at_x) ** 2 <= max(0.5, side / 20) ** 2
            y, x = y + length * math.sin(angle), x + length * math.cos(angle)
    if drawn.all():  # of an image of few pixels
        drawn[0, 0] = False
    drawn.flat[0] |= not drawn.any()
    return drawn


def describe(visible: Bool[np.ndarray, "h w"]) -> dict[str, Any]:
    """What a manifest says of a region: the share of the pixels kept, and a checksum of which."""
    digest = hashlib.sha256(np.packbits(visible).tobytes()).hexdigest()
    return {"kept": float(visible.mean()), "region_sha256": digest}
