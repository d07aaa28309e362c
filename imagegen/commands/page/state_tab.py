"""The tab State: what the model carries from pixel to pixel, while an image is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr
import numpy as np

from imagegen.commands.page.controls import AT_ONCE, QUEUE, beginning, status, stops, streamed
from imagegen.commands.page.pictures import heat, image_tag, shown
from imagegen.commands.page.studio import Studio, Wish
from imagegen.generation.state_walk import Moment, walk_state

WORDS = """
A linear attention layer is a recurrent network: all that it remembers of the pixels before is one
matrix per head, S = Σ φ(k) vᵀ, and its normaliser. It keeps its size, while a softmax layer keeps
the keys and values of every pixel. Blue is below zero, red above.
"""


def build(studio: Studio) -> None:
    """Fill the tab."""
    layers = studio.about().layers
    gr.Markdown(WORDS)
    with gr.Row():
        layer = gr.Slider(1, max(2, layers), 1, step=1, label="Layer", interactive=layers > 1)
        seed = gr.Number(0, label="Seed", precision=0)
    with gr.Row():
        start = gr.Button("Draw an image", variant="primary", elem_id="walk")
        stop = gr.Button("Stop", elem_id="stop-walk")
    said = gr.HTML(status("Each picture is the state behind the pixel drawn last."))
    result = gr.HTML(elem_id="state", padding=False)

    def draw(visitor: str, number: float, chosen: float | None) -> Iterator[tuple[Any, ...]]:
        wish = Wish(1, int(chosen or 0))
        wish.controls()

        def work(show: Callable[[Moment], None]) -> Moment:
            for moment in walk_state(studio.loaded().model, int(number) - 1, seed=wish.seed):
                show(moment)
            return moment

        length = studio.about().length
        yield gr.skip(), beginning(studio)
        for moment in studio.run(visitor, work):
            done = None if moment.position == length else moment.position / length
            yield view(moment, studio), status(bytes_of(moment, length), done)

    inputs, outputs = [layer, seed], [result, said]
    start.click(streamed(draw, ("",)), inputs, outputs, **QUEUE)
    stop.click(stops(studio), **AT_ONCE)


def view(moment: Moment, studio: Studio) -> str:
    """The image so far, and a picture per head."""
    image = shown(moment.levels[None], moment.known[None], studio.spec)[0]
    largest = float(np.abs(moment.matrices).max(initial=0.0))
    first = f"{image_tag(image, 'the image so far')}<figcaption>image</figcaption>"
    figures = [f"<figure>{first}</figure>"]
    figures += [
        f"<figure>{image_tag(heat(matrix, largest), f'state of head {head}')}"
        f"<figcaption>head {head}, {matrix.shape[0]}×{matrix.shape[1]}</figcaption></figure>"
        for head, matrix in enumerate(moment.matrices, 1)
    ]
    return f'<div class="heads">{"".join(figures)}</div>'


def bytes_of(moment: Moment, length: int) -> str:
    """How large the state is, beside that of a softmax."""
    return (
        f"step {moment.position} of {length}: the state of all layers takes "
        f"{moment.state_bytes:,} bytes; a cached softmax of this size takes "
        f"{moment.softmax_bytes:,} by now."
    )
