"""What an image's label adds to the input.

Axes: `b` batch, `n` position, `e` model width, `k` label, `a` area, `o` orientation.
"""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from imagegen.core.errors import UserError
from imagegen.model.embeddings import Raster
from imagegen.model.orientations import pixels_of


class LabelEmbedding(nn.Module):
    """A learned vector of each label, and one for each area of the image.

    Without the areas, what a label means at a place has to be worked out by the layers, and as a
    label is worth few of an image's bits, they learn that slowly (benchmarks/results/quality.md).

    Args:
        n_classes: number of labels.
        d_model: width `e` of the result.
        raster: the order of the values.
        grid: the image has grid x grid areas, or as many as pixels along a shorter side; 1 is
            without them.
        orders: in how many orientations images are known. An area is a part of the image as it is,
            in whatever orientation.

    Attributes:
        weight: of each label, and of "no label" in the last row; "k e".
        areas: what is added to that in each area; "k a e", or None.
        area: that of each step of the raster, in each orientation; "o n".

    Raises:
        UserError: for fewer than one label.
    """

    def __init__(
        self, n_classes: int, d_model: int, raster: Raster, grid: int = 1, orders: int = 1
    ) -> None:
        super().__init__()
        if n_classes < 1:
            raise UserError(f"n_classes={n_classes} must be at least 1.")
        self.n_classes = n_classes
        self.weight = nn.Parameter(torch.empty(n_classes + 1, d_model))
        nn.init.normal_(self.weight, std=d_model**-0.5)
        spec = raster.spec
        rows, columns = min(grid, spec.height), min(grid, spec.width)
        pixel = pixels_of(orders, spec.height, spec.width)
        pixel = pixel.repeat_interleave(raster.steps_per_pixel, dim=1)
        row, column = pixel // spec.width, pixel % spec.width
        area = row * rows // spec.height * columns + column * columns // spec.width
        self.register_buffer("area", area, persistent=False)
        self.areas = None
        if rows * columns > 1:
            self.areas = nn.Parameter(torch.zeros(n_classes + 1, rows * columns, d_model))

    def forward(
        self,
        labels: Int64[Tensor, " b"],
        place: Int64[Tensor, "#b n"],
        orientation: Int64[Tensor, " #b"] | None = None,
    ) -> Float[Tensor, "b n_or_1 e"]:
        """What is added to the input of steps, or the same of all steps.

        Args:
            labels: 0 to n_classes - 1, or below 0 for no label.
            place: the steps, in the raster.
            orientation: of the images, of those that are known; as they are by default.
        """
        row = torch.where(labels < 0, self.n_classes, labels)
        whole = nn.functional.embedding(row, self.weight).unsqueeze(1)
        if self.areas is None:
            return whole
        known = cast(Tensor, self.area)
        area = known[0, place] if orientation is None else known[orientation.unsqueeze(1), place]
        index = row.unsqueeze(1) * self.areas.shape[1] + area
        return whole + nn.functional.embedding(index, self.areas.flatten(0, 1))
