"""A progress bar with images/s on a terminal; silence elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Rate(TextColumn):
    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.1f} images/s")


@contextmanager
def image_progress(description: str, total: int) -> Iterator[Callable[[float], None]]:
    """Show a bar of `total` images on standard error while the block runs.

    Yields:
        advance(images): call it with the number of images done since the last call; fractions
        are fine.
    """
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda images: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total}"),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda images: bar.advance(task, images)
