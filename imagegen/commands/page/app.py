"""The page itself: its tabs, and what they share."""

from __future__ import annotations

import gradio as gr

from imagegen.commands.page import complete_tab, draw_tab, state_tab
from imagegen.commands.page.controls import stops
from imagegen.commands.page.studio import Studio

TABS = {
    "Complete": complete_tab.build,
    "Draw": draw_tab.build,
    "State": state_tab.build,
}
"""By title, in their order: functions that are called with the studio inside of the tab."""

CSS = """
.pixels { image-rendering: pixelated; }
.completions { display: flex; flex-wrap: wrap; gap: 12px; }
.completions figure { margin: 0; }
.completions img { width: 140px; height: auto; display: block; }
.grid { max-width: 100%; width: 560px; height: auto; }
.heads { display: flex; flex-wrap: wrap; gap: 10px; align-items: flex-start; }
.heads figure { margin: 0; }
.heads img { width: 120px; height: 120px; display: block; border: 1px solid #888; }
.wrong { color: #b00020; font-weight: 600; }
.dark .wrong { color: #ff8a80; }
.save { display: inline-block; margin-right: 16px; text-decoration: underline; }
.command { overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
progress { width: 100%; }
"""


def theme() -> gr.themes.Base:
    """Gradio's own, with the fonts of the machine: none is loaded."""
    return gr.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )


def build(studio: Studio) -> gr.Blocks:
    """The page of a model; see `imagegen.commands.page.server` for who serves it."""
    spec = studio.spec
    with gr.Blocks(
        title="imagegen", analytics_enabled=False, delete_cache=(300, 900), fill_width=True
    ) as page:
        gr.Markdown(
            f"# imagegen\n`{studio.ckpt}`: images of {spec.height} × {spec.width} pixels, "
            f"{'grey' if spec.channels == 1 else 'colour'}, {spec.levels} levels."
        )
        for title, fill in TABS.items():
            with gr.Tab(title):
                fill(studio)
        page.unload(stops(studio))
    return page
