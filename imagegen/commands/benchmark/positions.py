"""Where in an image steps are timed, and what that says of the whole image."""

from __future__ import annotations

from collections.abc import Sequence

from imagegen.core import values as opt
from imagegen.core.errors import UserError


def positions_of(value: object, steps: int, length: int) -> tuple[int, ...]:
    """First steps of the timed pieces, ascending: numbers, `middle` and `last`.

    Raises:
        UserError: for other words, and for pieces that an image has no room for.
    """
    last = length - 1 - steps
    if last < 0:
        raise UserError(f"steps={steps}, but an image has {length}; choose at most {length - 1}.")
    words = {"last": last, "middle": last // 2}
    values = opt.as_list(value)
    found = set()
    for one in [value] if values is None else values:
        number = words.get(str(one), one)
        if isinstance(number, str):
            raise UserError(f"positions holds {one}; it takes numbers, middle and last.")
        found.add(opt.whole_number(number, "positions", 0, last))
    if not found:
        raise UserError("positions is an empty list; such as positions=[10,middle,last].")
    return tuple(sorted(found))


def seconds_together(
    positions: Sequence[int], seconds: Sequence[float], steps: int, length: int
) -> float:
    """Seconds for all steps of a batch, from those of a step at a few positions.

    Between the middles of the pieces a step's time is taken to be linear in its position (the
    trapezoid rule), before the first and behind the last to be constant.

    Args:
        positions: first steps of the pieces, ascending.
        seconds: of a step of each piece.
        steps: of a piece.
        length: of an image.
    """
    import numpy as np

    middles = np.array(positions) + (steps + 1) / 2
    return float(np.interp(np.arange(length), middles, np.array(seconds)).sum())
