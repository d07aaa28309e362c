"""The tab Draw: a grid of new images, while they are drawn."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from html import escape
from typing import Any

import gradio as gr

from imagegen.commands.page.controls import (
    AT_ONCE,
    QUEUE,
    Fields,
    beginning,
    status,
    stops,
    streamed,
)
from imagegen.commands.page.pictures import GrowingGif, download, image_tag, shown
from imagegen.commands.page.studio import Studio, sample_command
from imagegen.generation.images import encode_png
from imagegen.generation.job import labelled_grid


def build(studio: Studio) -> None:
    """Fill the tab."""
    with gr.Row():
        with gr.Column(min_width=320):
            fields = Fields(studio, "images", 16, several=True)
            with gr.Row():
                start = gr.Button("Draw", variant="primary", elem_id="draw")
                again = gr.Button("Again with this seed", elem_id="again")
                stop = gr.Button("Stop", elem_id="stop-draw")
            said = gr.HTML(status("Draw takes a new seed; Again draws the same images."))
        with gr.Column(min_width=320):
            result = gr.HTML(elem_id="samples", padding=False)
            files = gr.HTML(elem_id="files", padding=False)

    def draw(visitor: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        wish, spec = fields.wish(*values), studio.spec
        labels, names = studio.labels(wish), studio.class_names() or None
        gif = GrowingGif()
        yield gr.skip(), "", "", beginning(studio)
        for frame in studio.samples(visitor, wish):
            grid = labelled_grid(shown(frame.levels, frame.known, spec), labels, names)
            gif.add(grid)
            done = status(f"drawing {wish.number} images", frame.done)
            tag = image_tag(grid, f"{wish.number} images, seed {wish.seed}")
            yield wish.seed, tag.replace('class="pixels"', 'class="pixels grid"'), "", done
        links = download(encode_png(grid), "image/png", f"seed-{wish.seed}.png", "PNG")
        links += download(gif.file(), "image/gif", f"seed-{wish.seed}.gif", "GIF of the growth")
        command = escape(sample_command(studio.ckpt, wish))
        links += f'<pre class="command" aria-label="command">{command}</pre>'
        yield gr.skip(), gr.skip(), links, status(f"{wish.number} images of seed {wish.seed}.")

    def draw_anew(visitor: str, number: Any, _: Any, *others: Any) -> Iterator[tuple[Any, ...]]:
        yield from draw(visitor, number, secrets.randbelow(1_000_000), *others)

    # The field takes the new seed with the first picture: it stays where the drawing is refused.
    event = {"outputs": [fields.seed, result, files, said], **QUEUE}
    for button, drawing in ((start, draw_anew), (again, draw)):
        button.click(streamed(drawing, (gr.skip(), "", "")), fields.inputs, **event)
    stop.click(stops(studio), **AT_ONCE)
