"""What a label adds to the input, against its definition."""

from __future__ import annotations

import pytest
import torch

from imagegen.core.spec import ImageSpec
from imagegen.model.label_embedding import LabelEmbedding
from imagegen.model.raster import Raster


@torch.no_grad()
@pytest.mark.parametrize(
    ("spec", "tokens", "grid"),
    [
        (ImageSpec(28, 28), "pixel", 7),
        (ImageSpec(5, 9), "pixel", 3),
        (ImageSpec(4, 6, 3), "subpixel", 4),
        (ImageSpec(4, 6, 3), "pixel", 4),
        (ImageSpec(3, 2), "pixel", 7),
        (ImageSpec(3, 2), "pixel", 1),
    ],
)
def test_each_pixel_has_the_vector_of_its_area(spec: ImageSpec, tokens: str, grid: int) -> None:
    raster = Raster(spec, tokens)
    embedding = LabelEmbedding(3, 8, raster, grid)
    assert embedding.areas is None or not embedding.areas.any()
    for parameter in embedding.parameters():
        torch.nn.init.normal_(parameter)
    labels = torch.tensor([2, -1, 0])
    found = embedding(labels, 0, raster.length)
    found = found.expand(3, raster.length, 8).unflatten(1, (spec.height, spec.width, -1))
    rows, columns = min(grid, spec.height), min(grid, spec.width)
    seen = set()
    for image, label in enumerate([2, 3, 0]):
        for y in range(spec.height):
            for x in range(spec.width):
                expected = embedding.weight[label]
                if embedding.areas is not None:
                    # The area that holds the pixel's upper left corner.
                    down, right = int(y / spec.height * rows), int(x / spec.width * columns)
                    seen.add(down * columns + right)
                    expected = expected + embedding.areas[label, down * columns + right]
                for channel in range(raster.steps_per_pixel):
                    assert torch.equal(found[image, y, x, channel], expected)
    assert embedding.areas is None or len(seen) == rows * columns == embedding.areas.shape[1]
    for start, count in ((0, 1), (raster.length - 2, 2)):
        part = embedding(labels, start, count).expand(3, count, 8)
        assert torch.equal(part, found.flatten(1, 3)[:, start : start + count])


def test_it_starts_as_one_vector_for_the_whole_image() -> None:
    embedding = LabelEmbedding(2, 4, Raster(ImageSpec(8, 8), "pixel"), 7)
    found = embedding(torch.tensor([1, -1]), 0, 64)
    assert torch.equal(found, embedding.weight[[1, 2], None].expand(2, 64, 4))
