"""The order of the values, and what a label adds to the input, against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.model.embeddings import TOKENS, Raster
from imagegen.model.labels import LabelEmbedding


@given(
    st.integers(1, 97),
    st.integers(1, 97),
    st.sampled_from([1, 3]),
    st.integers(1, 3),
    st.sampled_from(TOKENS),
)
@settings(max_examples=50, deadline=None)
def test_round_trip(height: int, width: int, channels: int, n: int, tokens: str) -> None:
    spec = ImageSpec(height, width, channels)
    raster = Raster(spec, tokens)
    images = torch.randint(0, 256, (n, *spec.shape), dtype=torch.uint8)
    sequence = raster.to_sequence(images)
    assert sequence.shape == (n, raster.length, channels if tokens == "pixel" else 1)
    assert torch.equal(raster.to_images(sequence), images)


def test_order_is_row_by_row_and_channel_by_channel() -> None:
    spec = ImageSpec(2, 2, 3)
    images = torch.arange(12, dtype=torch.uint8).view(1, 2, 2, 3)
    raster = Raster(spec)
    assert raster.to_sequence(images).flatten().tolist() == list(range(12))
    assert raster.row_length == 6
    # The first rows of an image are the first steps of its sequence.
    assert raster.to_sequence(images[:, :1]).flatten().tolist() == list(range(6))


def test_a_step_may_be_a_pixel() -> None:
    images = torch.arange(12, dtype=torch.uint8).view(1, 2, 2, 3)
    raster = Raster(ImageSpec(2, 2, 3), "pixel")
    assert raster.to_sequence(images)[0].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert (raster.length, raster.row_length, raster.values_per_step) == (4, 2, 3)
    with pytest.raises(UserError, match="tokens=word is unknown; choose one of subpixel"):
        Raster(ImageSpec(2, 2, 3), "word")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"height": 0, "width": 1}, "height is 0"),
        ({"height": 1, "width": 1, "channels": True}, "channels is True"),
        ({"height": 1, "width": 1, "levels": 1}, "levels is 1, but it must be between 2 and 256"),
        ({"height": 1, "width": 1, "levels": 257}, "levels is 257"),
        ({"height": 1 << 13, "width": 1 << 13}, "choose a smaller size"),
        ({"height": 1}, "must have height, width"),
        ({"height": 1, "width": 1, "depth": 1}, "must have height, width"),
    ],
)
def test_impossible_images_are_refused(values: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ImageSpec.from_dict(values)


def test_spec_keeps_plain_numbers() -> None:
    spec = ImageSpec(3, 4, 3, 17)
    assert ImageSpec.from_dict(spec.to_dict()) == spec
    assert np.prod(spec.shape) == spec.dims == 36


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
    found = embedding(labels, torch.arange(raster.length).unsqueeze(0))
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
        part = embedding(labels, torch.arange(start, start + count).unsqueeze(0)).expand(
            3, count, 8
        )
        assert torch.equal(part, found.flatten(1, 3)[:, start : start + count])


def test_it_starts_as_one_vector_for_the_whole_image() -> None:
    embedding = LabelEmbedding(2, 4, Raster(ImageSpec(8, 8), "pixel"), 7)
    found = embedding(torch.tensor([1, -1]), torch.arange(64).unsqueeze(0))
    assert torch.equal(found, embedding.weight[[1, 2], None].expand(2, 64, 4))
