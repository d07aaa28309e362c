"""The tab Runs: how the runs below a folder learn, while they do."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import gradio as gr

from imagegen.commands.page.controls import AT_ONCE, answered, status
from imagegen.commands.page.pictures import data_uri
from imagegen.commands.page.studio import Studio
from imagegen.commands.page.watched import Plot, RunsBelow, Watched, choose, newest_grids
from imagegen.core.errors import UserError
from imagegen.core.words import counted
from imagegen.tracking.curves import AGAINST
from imagegen.tracking.run_options import differences
from imagegen.tracking.runs_table import COLUMNS, Run, table_of

EVERY = 1.0
"""Seconds between two looks at the folder."""
_LOWER, _BITS = "lower axis", "bits/dim"
_DOTS = 110  # of the screen, an inch
_WIDTH = """(...values) => {
  const place = document.querySelector("#curves");
  return [...values.slice(0, -2), place ? place.clientWidth : 1000, values.at(-1)];
}"""


def build(studio: Studio) -> None:
    """Fill the tab."""
    below = RunsBelow(studio.runs)
    said = gr.HTML(status("reading the runs"), elem_id="runs-said")
    chosen = gr.Dropdown(
        [], value=[], multiselect=True, allow_custom_value=True, label="Runs", elem_id="runs"
    )
    with gr.Row():
        against = gr.Radio(list(AGAINST), value="steps", label="Against", elem_id="against")
        logs = gr.CheckboxGroup([_LOWER, _BITS], label="Logarithmic", elem_id="logs")
    parts = [gr.HTML(elem_id=name, padding=False) for name in ("curves", "options", "grids")]
    parts.append(gr.HTML(elem_id="table", padding=False))
    width = gr.Number(1000, visible=False)
    # What this visitor has been shown, and which runs there were.
    seen = gr.State(())

    def refresh(
        _: str, names: list[str] | None, kind: str, axes: list[str], wide: float, before: Any
    ) -> Iterator[tuple[Any, ...]]:
        known, old, keys = before or (None, None, (None,) * len(parts))
        try:
            found = below.now()
        except UserError as error:
            skipped = (gr.skip(),) * (1 + len(parts))
            yield *skipped, (known, None, keys), status(str(error), wrong=True)
            return
        inches = min(10.0, max(3.5, round(2 * (wide or 1000) / _DOTS) / 2))
        plot = Plot(kind, _LOWER in axes, _BITS in axes, inches)
        names = choose(found, names or [], known)
        state = tuple((name, each.run.state, each.stamp) for name, each in found.items())
        now = hash((state, plot, tuple(names)))
        if now == old:
            yield (gr.skip(),) * len(outputs)
            return
        texts = [
            curves_of(below, names, plot),
            options_of(found, names),
            grids_of(found, names),
            table(found, below),
        ]
        new = tuple(map(hash, texts))
        changed = [
            gr.skip() if a == b else text for text, a, b in zip(texts, new, keys, strict=True)
        ]
        # Their order changes while they train; whoever is choosing is left alone.
        there = tuple(sorted(found))
        listed = gr.skip() if known == there else gr.update(choices=list(found), value=names)
        yield listed, *changed, (there, now, new), sentence(found, below)

    inputs, outputs = [chosen, against, logs, width, seen], [chosen, *parts, seen, said]
    event = {"js": _WIDTH, **AT_ONCE}
    run = answered(refresh, (gr.skip(),) * 6)
    gr.Timer(EVERY).tick(run, inputs, outputs, **event)
    gr.on([chosen.input, against.input, logs.input], run, inputs, outputs, **event)


def sentence(found: dict[str, Watched], below: RunsBelow) -> str:
    """How many runs there are."""
    if not found:
        return status(f"there are no runs in {below.folder} yet.")
    running = sum(each.run.state == "running" for each in found.values())
    runs = f"{counted(len(found), 'run')} in {below.folder}"
    return status(f"{runs}, {running or 'none'} of them running.")


def curves_of(below: RunsBelow, names: list[str], plot: Plot) -> str:
    """The learning curves in one picture, or why there is none."""
    try:
        picture = below.picture(names, plot)
    except UserError as error:
        return status(str(error))
    found = below.now()
    there = {name: found[name] for name in names if name in found}
    best = [f"{name}: {_last(each.run)}" for name, each in there.items()]
    what = escape(f"bits/dim against {plot.against}; {'; '.join(best)}")
    source = data_uri(picture, "image/svg+xml")
    lacking = [name for name, each in there.items() if not each.curve.known(plot.against)]
    rest = ""
    if lacking:
        rest = status(f"there is no bits/dim against {plot.against} in {', '.join(lacking)} yet.")
    return f'<div class="curves"><img alt="{what}" src="{source}"></div>{rest}'


def _last(run: Run) -> str:
    steps = f"{run.state}, {run.steps:,} steps"
    return steps if run.best is None else f"{steps}, best {run.best:.4f}"


def options_of(found: dict[str, Watched], names: list[str]) -> str:
    """The options in which the chosen runs differ."""
    there = [name for name in names if name in found]
    if len(there) < 2:
        return ""
    differing = differences([found[name].run.folder for name in there])
    if not differing:
        return status("the runs chosen have the same options.")
    rows = [[key, *(value or "" for value in values)] for key, values in differing.items()]
    return html_table("Options in which the runs chosen differ", ["option", *there], rows)


def grids_of(found: dict[str, Watched], names: list[str]) -> str:
    """The newest pictures of the chosen runs."""
    figures = []
    for name in names:
        grids = newest_grids(found[name].run.folder) if name in found else {}
        for kind, (step, path) in sorted(grids.items()):
            try:
                source = data_uri(path.read_bytes())
            except OSError:  # vanished since
                continue
            words = escape(f"{name}: {kind} after {step:,} steps")
            figures.append(
                f'<figure><img class="pixels" alt="{words}" src="{source}">'
                f"<figcaption>{words}</figcaption></figure>"
            )
    return f'<div class="grids">{"".join(figures)}</div>'


def table(found: dict[str, Watched], below: RunsBelow) -> str:
    """What `imagegen runs` prints."""
    if not found:
        return ""
    common, rows = table_of([each.run for each in found.values()], [below.folder])
    words = "All runs" if not common else f"All runs, all of them with {' '.join(common)}"
    return html_table(words, list(COLUMNS), rows)


def html_table(caption: str, header: list[str], rows: list[list[str]]) -> str:
    """A table that scrolls by itself, its first column naming the rows."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    label = escape(caption)
    return (
        f'<div class="scrolls" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<caption>{label}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
