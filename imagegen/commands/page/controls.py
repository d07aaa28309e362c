"""What the tabs have in common: fields that say how to draw, running, sentences about mistakes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

import gradio as gr

from imagegen.commands.page.job import Stopped
from imagegen.commands.page.studio import Studio, Wish
from imagegen.core.errors import UserError, first_line

MOST_WAITING = 20
"""Visitors who draw or wait for their turn; others are told that too many do."""
QUEUE = {
    "concurrency_id": "model",
    "concurrency_limit": MOST_WAITING,
    "api_visibility": "private",
    "show_progress": "hidden",
}
"""Of everything that draws. It waits for `Desk.turn`, not in Gradio's queue, where no stop button
would find it."""
AT_ONCE = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}

NO_CLASS = "none"


class Fields:
    """Fields for a `Wish`; `inputs` are what an event takes, `wish` makes one of their values.

    Args:
        several: whether several classes may be chosen.
    """

    def __init__(self, studio: Studio, what: str, number: int, several: bool) -> None:
        names = studio.class_names()
        self.several = several
        with gr.Row():
            # Without limits, for which Gradio would raise errors of its own that name no field.
            self.number = gr.Number(number, label=f"Number of {what}")
            self.seed = gr.Number(0, label="Seed")
        with gr.Row():
            self.temperature = gr.Slider(0, 2, 1, step=0.05, label="Temperature")
            self.top_p = gr.Slider(0.05, 1, 1, step=0.05, label="Top p")
        with gr.Row(visible=bool(names)):
            self.label = gr.Dropdown(
                names if several else [NO_CLASS, *names],
                value=[] if several else NO_CLASS,
                multiselect=several,
                label="Classes, a column each" if several else "Class",
            )
            self.guidance = gr.Slider(0, 4, 1, step=0.1, label="Guidance towards the class")

    @property
    def inputs(self) -> list[Any]:
        """The fields, in the order that `wish` takes."""
        fields = [self.number, self.seed, self.temperature, self.top_p]
        return [*fields, self.guidance, self.label]

    def wish(self, *values: Any) -> Wish:
        """What is typed.

        Raises:
            UserError: for a number that is missing or not whole.
        """
        number, seed, temperature, top_p, guidance, label = values
        if number is None or seed is None or number % 1 or seed % 1:
            raise UserError("number and seed must be whole numbers.")
        chosen = label if self.several else [] if label in (None, NO_CLASS) else [label]
        return Wish(int(number), int(seed), temperature, top_p, guidance, tuple(chosen or ()))


def status(sentence: str, done: float | None = None, wrong: bool = False) -> str:
    """A sentence about a drawing as HTML, with a bar while it runs."""
    kind = ' class="wrong" role="alert"' if wrong else ' role="status"'
    bar = ""
    if done is not None:
        bar = f'<progress max="1" value="{done:.3f}" aria-label="share drawn"></progress>'
    return f"<div{kind}>{escape(sentence)}</div>{bar}"


def beginning(studio: Studio) -> str:
    """What is said until there is something to show."""
    if studio.desk.turn.locked():
        return status("waiting until another drawing has ended", 0.0)
    return status("getting ready, which takes some seconds with a model's first drawing", 0.0)


def told(frames: Iterator[tuple[Any, ...]], empty: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Frames for Gradio, each with its status last; a stop and a mistake become sentences.

    Args:
        empty: what is left of the others after a mistake.
    """
    try:
        yield from frames
    except Stopped as stop:
        yield (*(gr.skip() for _ in empty), status(str(stop)))
    except UserError as error:
        yield (*empty, status(str(error), wrong=True))
    except Exception as error:
        traceback.print_exc()
        said = f"that failed ({type(error).__name__}: {first_line(error)})"
        yield (*empty, status(f"{said}; the terminal says more.", wrong=True))


def streamed(
    frames: Callable[..., Iterator[tuple[Any, ...]]], empty: tuple[Any, ...]
) -> Callable[..., Any]:
    """What an event calls: `frames` of the visitor and the values of its inputs; see `told`."""
    # Gradio looks for a generator function with an annotation, which the checks of our tests would
    # wrap into another kind of function; a lambda they leave alone.
    run = lambda request, *values: (  # noqa: E731
        yield from told(frames(str(request.session_hash), *values), empty)
    )
    run.__annotations__["request"] = gr.Request
    return run


def answered(
    frames: Callable[..., Iterator[tuple[Any, ...]]], empty: tuple[Any, ...]
) -> Callable[..., Any]:
    """As `streamed`, of what has a single frame and does not wait in the queue."""

    def run(request: gr.Request, *values: Any) -> tuple[Any, ...]:
        return next(told(frames(str(request.session_hash), *values), empty))

    return run


def stops(studio: Studio) -> Callable[..., None]:
    """What a stop button does, and who closes the page."""

    def stop(request: gr.Request) -> None:
        studio.stop(str(request.session_hash))

    return stop
