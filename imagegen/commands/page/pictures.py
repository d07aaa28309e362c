"""Arrays as the page shows and downloads them, and what its canvas sends.

Axes: `b` image, `f` frame, `h w c` height, width, channel, `H W` of a picture.
"""

from __future__ import annotations

import base64
import binascii
import io
from html import escape
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image

from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.image_files import read_images
from imagegen.data.masks import read_visible
from imagegen.generation.images import encode_png, from_display, mask_hidden, to_display

_PNG = "data:image/png;base64,"
MOST_FRAMES = 48
"""Of a GIF; of longer drawings every second one is left out, then every second of these, …"""


def shown(
    levels: UInt8[np.ndarray, "b h w c"], known: Bool[np.ndarray, "b h w"], spec: ImageSpec
) -> UInt8[np.ndarray, "b h w c"]:
    """Images (0 to 255) in which what is not known yet is grey."""
    return mask_hidden(to_display(levels, spec.levels), known)


def data_uri(content: bytes, kind: str = "image/png") -> str:
    """A file of this kind as an address that holds it."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_tag(image: UInt8[np.ndarray, "h w c"], what: str) -> str:
    """An image of a page, with words for those who cannot see it."""
    return f'<img class="pixels" alt="{escape(what)}" src="{data_uri(encode_png(image))}">'


def download(content: bytes, kind: str, name: str, what: str) -> str:
    """A link that saves a file."""
    return f'<a class="save" download="{escape(name)}" href="{data_uri(content, kind)}">{what}</a>'


class GrowingGif:
    """Pictures of a drawing as an animation: evenly spread, a bounded number, and the last."""

    def __init__(self) -> None:
        self._kept: list[UInt8[np.ndarray, "H W c"]] = []
        self._last: list[UInt8[np.ndarray, "H W c"]] = []
        self._every, self._seen = 1, 0

    def add(self, picture: UInt8[np.ndarray, "H W c"]) -> None:
        """One more, in their order."""
        if self._seen % self._every == 0:
            self._kept.append(picture)
        self._last, self._seen = [picture], self._seen + 1
        if len(self._kept) > MOST_FRAMES:
            del self._kept[1::2]
            self._every *= 2

    def file(self) -> bytes:
        """The content of a GIF, which stays at the last picture for two seconds."""
        pictures = self._kept + self._last
        frames = [Image.fromarray(p[..., 0] if p.shape[2] == 1 else p) for p in pictures]
        buffer = io.BytesIO()
        durations = [80] * len(self._kept) + [2000]
        options = {"save_all": True, "append_images": frames[1:], "loop": 0}
        frames[0].save(buffer, format="GIF", duration=durations, **options)
        return buffer.getvalue()


def read_canvas(
    sent: object, spec: ImageSpec
) -> tuple[UInt8[np.ndarray, "h w c"], Bool[np.ndarray, "h w"]]:
    """Levels and visible pixels of what the canvas sends: a PNG whose hidden pixels are clear.

    Raises:
        UserError: for anything else.
    """
    wrong = UserError("the drawing did not arrive as it should; reload the page and draw again.")
    text = sent if isinstance(sent, str) else ""
    # Even without compression a picture takes no more.
    if not text.startswith(_PNG) or len(text) > 8 * spec.height * spec.width + 4096:
        raise wrong
    try:
        content = base64.b64decode(text.removeprefix(_PNG), validate=True)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if image.size != (spec.width, spec.height):
                raise wrong
            pixels = np.array(image.convert("RGBA"))
    except (binascii.Error, OSError, ValueError, SyntaxError) as error:
        raise wrong from error
    channels = pixels[..., : spec.channels]
    return from_display(np.ascontiguousarray(channels), spec.levels), pixels[..., 3] > 127


def write_canvas(
    levels: UInt8[np.ndarray, "h w c"], visible: Bool[np.ndarray, "h w"], spec: ImageSpec
) -> str:
    """What `read_canvas` reads, of levels."""
    colours = to_display(levels, spec.levels)
    colours = np.broadcast_to(colours, (*colours.shape[:2], 3))
    alpha = np.where(visible, 255, 0).astype(np.uint8)[..., None]
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate([colours, alpha], axis=2)).save(buffer, format="PNG")
    return data_uri(buffer.getvalue())


def read_upload(
    path: Path, spec: ImageSpec
) -> tuple[UInt8[np.ndarray, "h w c"], Bool[np.ndarray, "h w"]]:
    """Levels of an image file of a visitor, resized as `complete` does, and what is opaque of it.

    Raises:
        UserError: naming the file, where it is not an image that can be read.
    """
    try:
        images, sources = read_images([path], None, True, spec)
        visible = next(iter(read_visible(sources, None, spec)))
    except UserError as error:
        # Visitors know its name, not where it was put.
        raise UserError(str(error).replace(str(path), path.name)) from error
    if visible is None:
        visible = np.ones((spec.height, spec.width), dtype=bool)
    return from_display(images[0], spec.levels), visible


def heat(matrix: Float[np.ndarray, "d m"], largest: float) -> UInt8[np.ndarray, "d m 3"]:
    """A matrix as colours: blue below zero, white at zero, red above, full at `largest`."""
    strength = np.clip(matrix / largest if largest > 0 else matrix * 0, -1, 1)[..., None]
    towards = np.where(strength < 0, [33, 102, 172], [178, 24, 43])
    colours: np.ndarray = 255 + (towards - 255) * np.abs(strength)
    return colours.round().astype(np.uint8)


def bars(probabilities: Float[np.ndarray, " levels"], level: int, highest: float, what: str) -> str:
    """A picture of a distribution over levels, with a mark at one of them, as SVG in a page.

    Args:
        highest: probability at the upper end of its axis.
        what: words for those who cannot see it.
    """
    count, (width, height) = len(probabilities), (300, 110)
    left, top, bar = 40, 14, (300 - 40) / len(probabilities)
    tops = height + top - height * np.clip(probabilities / highest, 0, 1)
    path = "".join(f"V{y:.1f}h{bar:.4f}" for y in tops)
    mark = left + (level + 0.5) * bar
    bottom = top + height
    ticks = [f'<text x="{left - 4}" y="{top + 8}" text-anchor="end">{highest:.2g}</text>']
    ticks += [f'<text x="{left - 4}" y="{bottom}" text-anchor="end">0</text>']
    anchors = {0: "start", count // 2: "middle", count - 1: "end"}
    ticks += [
        f'<text x="{left + (at + 0.5) * bar:.1f}" y="{bottom + 14}" '
        f'text-anchor="{anchor}">{at}</text>'
        for at, anchor in anchors.items()
    ]
    return (
        f'<svg viewBox="0 0 {width} {bottom + 18}" role="img" aria-label="{escape(what)}">'
        f'<path class="bars" d="M{left} {bottom}{path}V{bottom}z"/>'
        f'<path class="axis" d="M{left} {top}V{bottom}H{width}"/>'
        f'<path class="mark" d="M{mark:.1f} {bottom}V{top - 4}"/>{"".join(ticks)}</svg>'
    )
