"""Regions of images at random, as models of any order are trained on.

Axes: `b` image, `h w` height, width, `m` segment of a stroke, `k` kind of region.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

SEGMENTS = 4
"""The most that a brush stroke has."""


def random_regions(
    count: int,
    height: int,
    width: int,
    whole: float,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> Bool[Tensor, "b h w"]:
    """Which pixels are visible, of each of `count` images; at least one of each is not.

    Nothing is visible in a share of them. The others are, equally often: visible from one of the
    four sides on; all but a rectangle; a rectangle alone; all but a brush stroke; or a random share
    of single pixels. Sizes, places and shares are uniform.

    Args:
        count: of images.
        height, width: of each, in pixels.
        whole: share of images of which nothing is visible, 0 to 1.
        device: of the result, on which everything is computed.
        generator: of that device; PyTorch's own by default.
    """

    def uniform(*shape: int) -> Tensor:
        return torch.rand(count, *shape, 1, 1, device=device, generator=generator)

    y = torch.arange(height, device=device).view(-1, 1) + 0.5
    x = torch.arange(width, device=device) + 0.5
    share, rows, columns, top, left = (uniform() for _ in range(5))
    rows, columns = (rows * height).clamp(min=1), (columns * width).clamp(min=1)
    top, left = top * (height - rows), left * (width - columns)
    rectangle = (y >= top) & (y < top + rows) & (x >= left) & (x < left + columns)
    scattered = torch.rand(count, height, width, device=device, generator=generator) < share
    columns_left, rows_above = x < share * width, y < share * height
    kinds = [
        rows_above,
        ~rows_above,
        columns_left,
        ~columns_left,
        ~rectangle,
        rectangle,
        ~_strokes(y, x, uniform(SEGMENTS + 1), uniform(SEGMENTS + 1), uniform(), uniform()),
        scattered,
    ]
    every = torch.stack([kind.expand(count, height, width) for kind in kinds], dim=1)
    chosen = (uniform().flatten() * len(kinds)).long().clamp(max=len(kinds) - 1)
    visible = every[torch.arange(count, device=device), chosen]
    # Where all would be kept, as from a side, nothing is.
    drawn_whole = (uniform() < whole) | visible.all(dim=2, keepdim=True).all(dim=1, keepdim=True)
    return visible & ~drawn_whole


def _strokes(
    y: Float[Tensor, "h 1"],
    x: Float[Tensor, " w"],
    down: Float[Tensor, "b m_and_1 1 1"],
    across: Float[Tensor, "b m_and_1 1 1"],
    length: Float[Tensor, "b 1 1"],
    thickness: Float[Tensor, "b 1 1"],
) -> Bool[Tensor, "b h w"]:
    """The pixels under a brush that goes from point to point; all but y and x are 0 to 1."""
    height, width = len(y), len(x)
    down, across = down * height, across * width
    (y0, y1), (x0, x1) = ((t[:, :-1], t[:, 1:]) for t in (down, across))
    # The nearest point of each segment to each pixel.
    squared = ((y1 - y0) ** 2 + (x1 - x0) ** 2).clamp(min=1e-6)
    along = (((y - y0) * (y1 - y0) + (x - x0) * (x1 - x0)) / squared).clamp(0, 1)
    distance = (y - y0 - along * (y1 - y0)) ** 2 + (x - x0 - along * (x1 - x0)) ** 2
    # A brush thinner than the first number might pass between the centres of pixels.
    radius = 0.75 + thickness * min(height, width) / 10
    used = torch.arange(SEGMENTS, device=y.device) <= (length * SEGMENTS).flatten(1)
    under = (distance <= (radius**2).unsqueeze(1)) & used[:, :, None, None]
    return under.any(dim=1)
