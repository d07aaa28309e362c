"""The page itself: its tabs, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gradio as gr

from imagegen.commands.page import complete_tab, draw_tab, runs_tab, state_tab, surprise_tab
from imagegen.commands.page.controls import stops
from imagegen.commands.page.studio import Studio

TABS = {
    "Complete": complete_tab.build,
    "Draw": draw_tab.build,
    "State": state_tab.build,
    "Surprise": surprise_tab.build,
    "Runs": runs_tab.build,
}
"""By title, in their order: functions that are called with the studio inside of the tab."""

CSS = """
.pixels { image-rendering: pixelated; }
.completions { display: flex; flex-wrap: wrap; gap: 12px; }
.completions figure { margin: 0; }
.completions img { width: 140px; height: auto; display: block; }
.grid { max-width: 100%; width: 560px; max-height: 90vh; object-fit: contain;
  object-position: left top; }
.heads { display: flex; flex-wrap: wrap; gap: 10px; align-items: flex-start; }
.heads figure { margin: 0; }
.heads img { width: 120px; height: 120px; display: block; border: 1px solid #888; }
.wrong { color: #b00020; font-weight: 600; }
.dark .wrong { color: #ff8a80; }
.save { display: inline-block; margin-right: 16px; text-decoration: underline; }
.command { overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
.distribution { display: flex; flex-wrap: wrap; gap: 12px; }
.distribution figure { margin: 0; flex: 1 1 240px; max-width: 420px; }
.distribution svg { width: 100%; height: auto; font-size: 11px; fill: currentColor; }
.distribution .bars { fill: var(--channel); }
.distribution .axis { fill: none; stroke: currentColor; }
.distribution .mark { fill: none; stroke: currentColor; stroke-dasharray: 3 2; }
.curves img { width: 100%; height: auto; background: white; }
.scrolls { overflow-x: auto; }
.scrolls table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.scrolls caption { text-align: left; font-weight: 600; padding: 4px 0; }
.scrolls th, .scrolls td { border: 1px solid #8886; padding: 3px 8px; text-align: left;
  max-width: 32em; overflow-wrap: break-word; }
.grids { display: flex; flex-wrap: wrap; gap: 12px; align-items: flex-start; }
.grids figure { margin: 0; max-width: 100%; }
.grids img { width: 320px; max-width: 100%; height: auto; display: block; }
progress { width: 100%; }
.nav-holder nav a[href] { color: inherit; }
"""


def theme() -> gr.themes.Base:
    """Gradio's own, with the fonts of the machine: none is loaded; and more contrast.

    Small text needs 4.5 to 1 (Web Content Accessibility Guidelines 2.2, 1.4.3).
    """
    own = gr.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    grey, light = "*neutral_600", "*neutral_300"
    return own.set(
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_800",
        body_text_color_subdued=grey,
        body_text_color_subdued_dark=light,
        input_placeholder_color=grey,
        input_placeholder_color_dark=light,
    )


def build(studios: Sequence[Studio]) -> gr.Blocks:
    """The page of each model, with links between them.

    See `imagegen.commands.page.server` for who serves it.
    """
    page = gr.Blocks(
        title="imagegen", analytics_enabled=False, delete_cache=(300, 900), fill_width=True
    )
    for number, studio in enumerate(studios):
        name = Path(studio.ckpt).resolve().name
        with page if number == 0 else page.route(name):
            first = Path(studios[0].ckpt).resolve().name
            gr.Navbar(main_page_name=first, visible=len(studios) > 1)
            _fill(page, studio)
    return page


def _fill(page: gr.Blocks, studio: Studio) -> None:
    spec = studio.spec
    gr.Markdown(
        f"# imagegen\n`{studio.ckpt}`: images of {spec.height} × {spec.width} pixels, "
        f"{'grey' if spec.channels == 1 else 'colour'}, {spec.levels} levels."
    )
    # On narrow screens all of them stay in sight.
    with gr.Tabs(overflow_behavior="wrap"):
        for title, fill in TABS.items():
            with gr.Tab(title):
                fill(studio)
    page.unload(stops(studio))
