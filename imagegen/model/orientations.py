"""The rotations and mirror images of the square, and by which of them a model should begin.

An orientation is a whole number 0 to 7, of three bits: 4 exchanges rows and columns, then 2 turns
the order of the rows round, then 1 that of the columns. 0 leaves an image as it is; the first two
and the first four orientations are groups as all eight are (the dihedral group of the square), and
keep the shape of images that are not square.

Axes: `b` image, `o` orientation, `h w` height, width, `p` pixel.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from imagegen.core.errors import UserError

ORDERS = (1, 2, 4, 8)
"""How many orientations a model may know: the first ones."""

WORDS = (
    "as it is",
    "mirrored left to right",
    "mirrored top to bottom",
    "turned by 180 degrees",
    "mirrored along the diagonal from the upper left",
    "turned by 90 degrees clockwise",
    "turned by 90 degrees counterclockwise",
    "mirrored along the diagonal from the upper right",
)


def check_orders(orders: int, height: int, width: int) -> None:
    """Refuse numbers of orientations that images cannot have.

    Raises:
        UserError: for those.
    """
    if orders not in ORDERS:
        raise UserError(f"model.orders={orders} must be 1, 2, 4 or 8.")
    if orders == 8 and height != width:
        raise UserError(
            f"model.orders=8 turns images by 90 degrees, but {height}x{width} pixels are not "
            "square; use model.orders=4."
        )


def turn(
    images: Shaped[Tensor, "b h w *c"], orientation: Int64[Tensor, " b"]
) -> Shaped[Tensor, "b h w *c"]:
    """Each image in its orientation, on the device of both.

    Args:
        images: also masks, or anything else that has rows and columns; square for orientations from
            4 on.
        orientation: 0 to 7.
    """
    bits = orientation.view(-1, *(1,) * (images.dim() - 1))
    if images.shape[1] == images.shape[2]:
        images = torch.where(bits & 4 != 0, images.transpose(1, 2), images)
    images = torch.where(bits & 2 != 0, images.flip(1), images)
    return torch.where(bits & 1 != 0, images.flip(2), images)


def turn_back(
    images: Shaped[Tensor, "b h w *c"], orientation: Int64[Tensor, " b"]
) -> Shaped[Tensor, "b h w *c"]:
    """The inverse of `turn`."""
    # Quarter turns are the only ones that are not their own inverse.
    quarter = (orientation == 5) | (orientation == 6)
    return turn(images, torch.where(quarter, 11 - orientation, orientation))


def pixels_of(orders: int, height: int, width: int) -> Int64[Tensor, "o p"]:
    """Where each pixel of an image in the first `orders` orientations comes from.

    Pixels are counted row by row.
    """
    pixels = torch.arange(height * width).view(1, height, width).expand(orders, -1, -1)
    return turn(pixels, torch.arange(orders)).flatten(1)


def best_orientation(visible: Bool[Tensor, "h w"], orders: int) -> int:
    """The first of the orientations in which the fewest pairs of pixels are in the wrong order.

    That is a missing pixel before a visible one, row by row. Without such a pair, all that is
    visible comes before all that is not.
    """
    every = turn(visible.expand(orders, -1, -1), torch.arange(orders)).flatten(1)
    missing_before = (~every).cumsum(dim=1)
    return int((missing_before * every).sum(dim=1).argmin())
