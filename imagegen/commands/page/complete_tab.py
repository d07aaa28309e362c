"""The tab Complete: draw or load an image, erase some of it, and let the model fill it in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from imagegen.commands.page.canvas import canvas
from imagegen.commands.page.controls import (
    AT_ONCE,
    QUEUE,
    Fields,
    beginning,
    status,
    stops,
    streamed,
)
from imagegen.commands.page.pictures import image_tag, read_canvas, read_upload, shown, write_canvas
from imagegen.commands.page.studio import Growing, Studio
from imagegen.core.errors import UserError

_UNCHANGED = gr.skip()


def build(studio: Studio) -> None:
    """Fill the tab."""
    with gr.Row():
        with gr.Column(min_width=320):
            paper = canvas(studio.spec)
            upload = gr.UploadButton("Load an image", elem_id="load")
        with gr.Column(min_width=320):
            fields = Fields(studio, "completions", 4, several=False)
            with gr.Row():
                start = gr.Button("Complete", variant="primary", elem_id="complete")
                stop = gr.Button("Stop", elem_id="stop-complete")
            said = gr.HTML(status("Draw, erase what the model is to fill in, then press Complete."))
            result = gr.HTML(elem_id="completions", padding=False)

    def load(path: str) -> tuple[Any, str]:
        try:
            levels, visible = read_upload(Path(path), studio.spec)
        except UserError as error:
            return _UNCHANGED, status(str(error), wrong=True)
        return write_canvas(levels, visible, studio.spec), status("Erase what is to be drawn.")

    def complete(visitor: str, sent: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        wish = fields.wish(*values)
        levels, visible = read_canvas(sent, studio.spec)
        yield "", beginning(studio)
        for frame in studio.completions(visitor, levels, visible, wish):
            yield pictures_of(frame, studio), said_of(frame, wish.number)

    upload.upload(load, upload, [paper, said], **AT_ONCE)
    start.click(streamed(complete, ("",)), [paper, *fields.inputs], [result, said], **QUEUE)
    stop.click(stops(studio), **AT_ONCE)


def pictures_of(frame: Growing, studio: Studio) -> str:
    """The completions side by side."""
    images = shown(frame.levels, frame.known, studio.spec)
    figures = (
        f"<figure>{image_tag(image, f'completion {number}')}</figure>"
        for number, image in enumerate(images, 1)
    )
    return f'<div class="completions" data-finished="{frame.finished}">{"".join(figures)}</div>'


def said_of(frame: Growing, number: int) -> str:
    """How far a drawing is."""
    if not frame.finished:
        return status(f"drawing {number} completions", frame.done)
    return status(" ".join([f"{number} completions.", *frame.remarks]))
