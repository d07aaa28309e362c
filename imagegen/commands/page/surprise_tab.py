"""The tab Surprise: the bits of every pixel of an image, and what was expected instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from imagegen.commands.page.controls import NO_CLASS, QUEUE, beginning, status, streamed
from imagegen.commands.page.pictures import bars, image_tag, read_upload
from imagegen.commands.page.studio import Studio
from imagegen.commands.page.surprises import Looked, Picture, Pixel, Surprises
from imagegen.core.errors import UserError
from imagegen.evaluation.maps import heat, legend, most_bits
from imagegen.generation.images import to_display

WORDS = """
A pixel is as bright as it surprised the model, which knows the pixels above it and to the left of
it in its row: it shows -log2 of the probability of its values. Point at a pixel, touch it, or move
with the arrow keys.
"""
_SCRIPT = Path(__file__).with_name("look.js")
_PLACE = """() => {
  const { row, column } = document.querySelector("#maps .frame").dataset;
  return [Number(row), Number(column)];
}"""
_STYLE = """
.looked { display: flex; flex-wrap: wrap; gap: 12px; }
.looked figure { margin: 0; width: min(300px, calc(50% - 6px)); }
.looked img { width: 100%; height: auto; display: block; }
.frame { position: relative; cursor: crosshair; touch-action: manipulation; }
.frame:focus-visible { outline: 3px solid #1f5fbf; outline-offset: 2px; }
.cursor { position: absolute; pointer-events: none; outline: 2px solid #00c8ff; }
.scale { max-width: 320px; }
"""
_COLOURS = {1: ("#7a8794",), 3: ("#d0342c", "#2e8b3d", "#2f6fd0")}
_CHANNELS = {1: ("grey",), 3: ("red", "green", "blue")}


def build(studio: Studio) -> None:
    """Fill the tab."""
    surprises = Surprises(studio)
    names = studio.class_names()
    gr.Markdown(WORDS)
    with gr.Row():
        index = gr.Number(0, label="Number of a test image")
        label = gr.Dropdown(
            [NO_CLASS, *names], value=NO_CLASS, label="Class", visible=bool(names), elem_id="class"
        )
    with gr.Row():
        show = gr.Button("Show the test image", variant="primary", elem_id="show-test")
        upload = gr.UploadButton("Load an image", elem_id="load-surprise")
    said = gr.HTML(status("Load an image, or show one that the model was not trained on."))
    maps = gr.HTML(
        css_template=_STYLE,
        js_on_load=_SCRIPT.read_text(encoding="utf-8"),
        apply_default_css=False,
        elem_id="maps",
        padding=False,
    )
    expected = gr.HTML(elem_id="expected", padding=False)

    def frames(visitor: str, which: Picture | int) -> Iterator[tuple[Any, ...]]:
        yield gr.skip(), gr.skip(), gr.skip(), beginning(studio)
        looked = surprises.look(visitor, which)
        pixel = surprises.at(visitor, *looked.first)
        yield looked.picture.label or NO_CLASS, maps_of(looked), chart(pixel), told_of(looked)

    def load(visitor: str, path: str) -> Iterator[tuple[Any, ...]]:
        levels, opaque = read_upload(Path(path), studio.spec)
        name = Path(path).name + ("" if opaque.all() else " (transparent pixels count too)")
        yield from frames(visitor, Picture(levels, name))

    def test(visitor: str, number: float | None) -> Iterator[tuple[Any, ...]]:
        if number is None or number % 1:
            raise UserError("the number of a test image must be a whole number.")
        yield from frames(visitor, int(number))

    def relabel(visitor: str, name: str) -> Iterator[tuple[Any, ...]]:
        picture = surprises.shown(visitor).picture
        given = None if name == NO_CLASS else name
        yield from frames(visitor, Picture(picture.levels, picture.name, given))

    def point(visitor: str, row: int, column: int) -> Iterator[tuple[Any, ...]]:
        yield chart(surprises.at(visitor, row, column)), gr.skip()

    outputs = [label, maps, expected, said]
    kept = (gr.skip(), gr.skip(), gr.skip())
    upload.upload(streamed(load, kept), upload, outputs, **QUEUE)
    gr.on([show.click, index.submit], streamed(test, kept), index, outputs, **QUEUE)
    label.input(streamed(relabel, kept), label, outputs, **QUEUE)
    # Not behind the drawings; one at a time, and of a visitor's the newest.
    glance = {"concurrency_id": "glance", "concurrency_limit": 1, "trigger_mode": "always_last"}
    # Where the pointer is when it is asked, which an event that waited would not know.
    place = [gr.Number(0, precision=0, visible=False) for _ in range(2)]
    run = streamed(point, (gr.skip(),))
    maps.select(run, place, [expected, said], js=_PLACE, **{**QUEUE, **glance})


def maps_of(looked: Looked) -> str:
    """The image, its map and the likeliest values side by side, above the scale of the map."""
    levels, (row, column) = looked.picture.levels, looked.first
    spec = looked.spec
    pictures = {
        "image": to_display(levels, spec.levels),
        "bits of each pixel": heat(looked.bits / most_bits(spec)),
        "likeliest values": to_display(looked.best, spec.levels),
    }
    place = f'data-rows="{spec.height}" data-columns="{spec.width}"'
    place += f' data-row="{row}" data-column="{column}"'
    focus = 'tabindex="0" role="group" aria-label="Pixels of the image; arrow keys choose one."'
    figures = [
        # One of them is enough for who goes from field to field.
        f'<figure><div class="frame" {place} {focus if number == 1 else ""}>'
        f'{image_tag(picture, name)}<div class="cursor"></div></div>'
        f"<figcaption>{name}</figcaption></figure>"
        for number, (name, picture) in enumerate(pictures.items())
    ]
    most = f"{most_bits(spec):.3g}"
    scale = image_tag(legend(320, spec), f"scale of the bits: black is 0, white {most} or more")
    scale = scale.replace('class="pixels"', 'class="scale"')
    return f'<div class="looked">{"".join(figures)}</div>{scale}'


def chart(pixel: Pixel) -> str:
    """What was expected at a pixel, in words and a picture a channel."""
    channels = len(pixel.levels)
    highest = float(pixel.probabilities.max())
    said, figures = [], []
    for channel in range(channels):
        name, p = _CHANNELS[channels][channel], pixel.probabilities[channel]
        level, best = int(pixel.levels[channel]), int(p.argmax())
        words = f"{name}: level {level} with probability {p[level]:.2g}"
        words += ", the likeliest" if level == best else f", likeliest {best} with {p[best]:.2g}"
        said.append(words)
        figures.append(
            f'<figure style="--channel: {_COLOURS[channels][channel]}">'
            f"{bars(p, level, highest, f'probability of each level, {words}')}"
            f"<figcaption>{name}: probability of each level</figcaption></figure>"
        )
    place = f"row {pixel.row + 1}, column {pixel.column + 1}: {pixel.bits:.2f} bits"
    sentence = status(f"{place}; {'; '.join(said)}.")
    return f'{sentence}<div class="distribution">{"".join(figures)}</div>'


def told_of(looked: Looked) -> str:
    """The bits of the image in a sentence."""
    bits, given = looked.bits.sum(), looked.picture.label
    label = "" if given is None else f", given the class {given}"
    return status(
        f"{looked.picture.name}: {looked.bits_per_dim:.4f} bits/dim{label}; {bits:.1f} bits in all."
    )
