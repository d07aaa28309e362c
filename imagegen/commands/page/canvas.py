"""A small canvas in the browser, with a pixel for each of the image's, so that none is blended.

Gradio's own editor works on enlarged pictures with soft brushes, from which the exact value of a
pixel could not be had back. What this one sends and takes is read by `read_canvas` and written by
`write_canvas` of `imagegen.commands.page.pictures`.
"""

from __future__ import annotations

from pathlib import Path

import gradio as gr
import numpy as np

from imagegen.commands.page.pictures import write_canvas
from imagegen.core.spec import ImageSpec

_SCRIPT = Path(__file__).with_name("canvas.js")

_CHOICES = """
<button type="button" data-tool="draw" aria-pressed="true">Draw</button>
<button type="button" data-tool="erase" aria-pressed="false">Erase</button>
<button type="button" data-tool="restore" aria-pressed="false">Restore</button>
"""
_KEPT = "".join(
    f'<button type="button" data-keep="{side}">Keep {words}</button>'
    for side, words in {
        "top": "the top",
        "bottom": "the bottom",
        "left": "the left",
        "right": "the right",
        "all": "all",
        "nothing": "nothing",
    }.items()
)

_STYLE = """
.paper { width: min(100%, 392px); height: auto; display: block; image-rendering: pixelated;
  touch-action: none; cursor: crosshair; border: 1px solid #888;
  background: repeating-conic-gradient(#9aa7b5 0% 25%, #c3ccd6 0% 50%) 50% / 16px 16px; }
.tools { display: flex; flex-wrap: wrap; gap: 6px; margin: 6px 0; align-items: center; }
.tools button { margin: 0; border: 1px solid #888; border-radius: 6px; padding: 4px 10px; }
.tools button[aria-pressed="true"] { background: #1f5fbf; color: white; }
.tools label { display: flex; gap: 6px; align-items: center; }
"""


def canvas(spec: ImageSpec) -> gr.HTML:
    """An empty canvas for images of this size; its value is what is drawn."""
    size = max(1, round(min(spec.height, spec.width) / 14))
    if spec.channels == 1:
        ink = '<input type="range" data-ink min="0" max="255" value="255">'
    else:
        ink = '<input type="color" data-ink value="#ffffff">'
    template = f"""
<div class="tools" role="group" aria-label="Tool">{_CHOICES}</div>
<canvas class="paper" width="{spec.width}" height="{spec.height}" tabindex="0" role="img"
  aria-label="Your image; arrow keys move the brush, space uses it. Chequered pixels are drawn by
  the model."></canvas>
<div class="tools">
<label>Brush <input type="range" data-brush min="1" max="{max(2, size * 4)}" value="{size}"></label>
<label>Ink {ink}</label>
<button type="button" data-clear>Clear</button>
</div>
<div class="tools" role="group" aria-label="What is kept">{_KEPT}</div>
"""
    empty = np.zeros(spec.shape, np.uint8), np.ones((spec.height, spec.width), bool)
    return gr.HTML(
        value=write_canvas(*empty, spec),
        label="Your image",
        html_template=template,
        css_template=_STYLE,
        js_on_load=_SCRIPT.read_text(encoding="utf-8"),
        apply_default_css=False,
        elem_id="paper",
        padding=False,
    )
