"""Pictures of the bits of every pixel and a table of all images, the most surprising first.

Axes: `n` image, `h w c` height, width, channel; `H W` of a picture.
"""

from __future__ import annotations

import csv
import io
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int64, UInt8
from PIL import Image, ImageDraw

from imagegen.core.spec import ImageSpec
from imagegen.evaluation.scores import checked, default_batch
from imagegen.evaluation.surprise import bits_of_pixels
from imagegen.generation.images import (
    CAPTION_HEIGHT,
    PADDING_VALUE,
    caption_fits,
    caption_font,
    encode_png,
    grid_limit,
    make_grid,
    to_display,
    with_captions,
)
from imagegen.model.transformer import ImageTransformer

GRID_IMAGES = 20
"""Images in `grid.png`."""

PRINTED = 5
"""Images that the command names."""

_MIN_SIDE = 112


@dataclass(frozen=True)
class Rival:
    """The label that suits an image best.

    Attributes:
        label: its name.
        bits_less: than under the image's own label; 0 where it is that.
    """

    label: str
    bits_less: float


@dataclass(frozen=True)
class Row:
    """A scored image.

    Attributes:
        bits_per_dim: of the image.
        index: in its split.
        label: name of its class; empty where the data set has none.
        source: its file or place.
        file: its picture, in the folder.
        rival: None where labels are not compared.
    """

    bits_per_dim: float
    index: int
    label: str
    source: str
    file: str
    rival: Rival | None = None

    @property
    def said(self) -> str:
        """The row in words."""
        called = self._called(None)
        label = f" ({called})" if called else ""
        return f"{self.bits_per_dim:.4f} bits/dim  {_shortened(self.source, None)}{label}"

    def captions(self, width: int) -> list[str]:
        """The row in two lines, or in one without a label, for a picture of this width in pixels.

        Names are shortened as far as it takes; the figures alone may still be too wide.
        """

        def first(most: int) -> str:
            return f"{self.bits_per_dim:.3f} bits/dim  {_shortened(self.source, most)}"

        return [_fitting(say, width) for say in ((first, self._called) if self.label else (first,))]

    def _called(self, most: int | None) -> str:
        """The label and its rival, if any, in at most so many letters each."""
        label = _shortened(self.label, most)
        if not (self.rival and self.rival.bits_less):
            return label
        rival = _shortened(self.rival.label, most)
        return f"{label}; {self.rival.bits_less:.1f} bits less as {rival}"


def _shortened(name: str, most: int | None) -> str:
    """A name, which may hold any character, as it can be shown: without its middle if too long."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    if most is None or len(shown) <= most:
        return shown
    return f"{shown[: (most - 1) // 2]}…{shown[len(shown) - most // 2 :]}"


def _fitting(say: Callable[[int], str], width: int) -> str:
    """What is said with as many letters of each name as there is room for."""
    sizes = range(1, max(1, width) + 1)  # no letter is narrower than a pixel
    # Ten texts are measured, not hundreds: a split has thousands of images.
    too_many = bisect_left(sizes, True, key=lambda most: not caption_fits(say(most), width))
    return say(sizes[max(0, too_many - 1)])


def write_maps(
    folder: Path,
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    labels: Int64[np.ndarray, " n"] | None,
    sources: Sequence[str],
    names: Sequence[str],
    batch_size: int | None,
    progress: Callable[[float], None],
    classes: Sequence[str] | None = None,
) -> list[Row]:
    """Fill a folder with a picture of each image, a table of all, and the first in a grid.

    No more than a batch of images and maps is held at a time.

    Args:
        folder: empty.
        model, images, labels, batch_size, progress: as in `score_images`.
        sources, names: what to call each image, and its class or nothing.
        classes: names of all that the model knows, to compare the images' labels with them.

    Returns:
        A row for each image, the most surprising first; with classes, those first that another
        label suits better, by how much.

    Raises:
        UserError: where a score is not finite.
    """
    (folder / "images").mkdir()
    rows = []
    batch_size = batch_size or default_batch(model)
    for first in range(0, len(images), batch_size):
        batch = slice(first, first + batch_size)
        known = None if labels is None else labels[batch]
        bits = bits_of_pixels(model, images[batch], known, batch_size)
        scores = checked(bits.sum(axis=(1, 2)) / model.spec.dims, first)
        rivals: Sequence[Rival | None] = [None] * len(bits)
        if classes is not None and known is not None:
            rivals = _rivals(model, images[batch], known, scores, classes, first)
        for index, score in enumerate(scores.tolist(), first):
            image, each, rival = images[index], bits[index - first], rivals[index - first]
            place = f"images/{index:05d}.png"
            row = Row(score, index, names[index], sources[index], place, rival)
            picture = draw_map(image, each, model.spec, row)
            _write(folder / row.file, picture, model.spec)
            rows.append(row)
        progress(len(bits))
    rows.sort(key=lambda row: (-_bits_less(row), -row.bits_per_dim, row.index))
    _write_table(folder / "images.csv", rows)
    count = min(GRID_IMAGES, grid_limit(*picture.shape[:2]))
    tiles = [_read(folder / row.file)[:-CAPTION_HEIGHT] for row in rows[:count]]
    grid = make_grid(np.stack(tiles), columns=4, padding=8, min_side=1)
    _write(folder / "grid.png", grid, model.spec)
    return rows


def _rivals(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    labels: Int64[np.ndarray, " n"],
    scores: Float64[np.ndarray, " n"],
    classes: Sequence[str],
    first: int,
) -> list[Rival]:
    """The rival of each image of a batch, given bits/dim under its own label; as `write_maps`."""
    every = np.empty((len(images), len(classes)))
    rows = np.arange(len(images))
    every[rows, labels] = scores
    for further in range(1, len(classes)):
        others = (labels + further) % len(classes)
        bits = bits_of_pixels(model, images, others, len(images))
        every[rows, others] = checked(bits.sum(axis=(1, 2)) / model.spec.dims, first)
    less = (scores - every.min(axis=1)) * model.spec.dims
    best = [classes[label] for label in every.argmin(axis=1)]
    return list(map(Rival, best, less.tolist()))


def _bits_less(row: Row) -> float:
    return 0.0 if row.rival is None else row.rival.bits_less


def draw_map(
    image: UInt8[np.ndarray, "h w c"],
    bits: Float64[np.ndarray, "h w"],
    spec: ImageSpec,
    row: Row,
) -> UInt8[np.ndarray, "H W 3"]:
    """An image beside the bits of its pixels, below the lines of text that say what it is.

    Args:
        image: levels.
        bits: of each pixel, all channels together.
        spec: of the image.
        row: see `Row.captions`.
    """
    shown = to_display(image, spec.levels)
    colour = np.broadcast_to(shown, (*bits.shape, 3))
    pair = np.stack([colour, heat(bits / most_bits(spec))])
    picture = make_grid(pair, columns=2, min_side=_MIN_SIDE)
    for line in reversed(row.captions(picture.shape[1])):
        picture = with_captions(picture, [line])
    return picture


def most_bits(spec: ImageSpec) -> float:
    """The end of the colour scale: what a pixel costs where every level is equally likely.

    So colours mean the same for all images, calls and models of these images.
    """
    return spec.channels * math.log2(spec.levels)


def heat(share: Float64[np.ndarray, "*s"]) -> UInt8[np.ndarray, "*s 3"]:
    """Colours of a glowing body: black at 0, through red and yellow to white at 1 and above."""
    channels = np.clip(share[..., None] * 3 - np.arange(3), 0, 1)
    return (channels * 255).round().astype(np.uint8)


@cache
def legend(width: int, spec: ImageSpec) -> UInt8[np.ndarray, "H W 3"]:
    """The colour scale of all maps, to be put below a picture of this width."""
    strip = Image.new("RGB", (width, CAPTION_HEIGHT), (PADDING_VALUE,) * 3)
    drawn, font = ImageDraw.Draw(strip), caption_font()
    low, high = "bits: 0", f"{most_bits(spec):.3g} or more"
    left, right = (math.ceil(drawn.textlength(text, font=font)) + 6 for text in (low, high))
    middle = CAPTION_HEIGHT / 2
    drawn.text((3, middle), low, fill=0, font=font, anchor="lm")
    drawn.text((width - 3, middle), high, fill=0, font=font, anchor="rm")
    pixels = np.array(strip)
    scale = heat(np.linspace(0, 1, max(0, width - left - right)))
    pixels[3:-3, left : left + len(scale)] = scale
    return pixels


def _write_table(path: Path, rows: Sequence[Row]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    columns = ["bits_per_dim", "index", "label", "source", "file"]
    compared = [] if rows[0].rival is None else ["likeliest_label", "bits_less"]
    writer.writerow(columns + compared)
    for row in rows:
        rival = () if row.rival is None else (row.rival.label, row.rival.bits_less)
        writer.writerow((*(getattr(row, name) for name in columns), *rival))
    path.write_bytes(text.getvalue().encode("utf-8", "backslashreplace"))


def _write(path: Path, picture: UInt8[np.ndarray, "H W 3"], spec: ImageSpec) -> None:
    path.write_bytes(encode_png(np.concatenate([picture, legend(picture.shape[1], spec)])))


def _read(path: Path) -> UInt8[np.ndarray, "H W 3"]:
    with Image.open(path) as image:
        return np.array(image)
