"""A drawing in a thread of its own, whose newest picture can be had while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

PAUSE = 0.04
"""Seconds between two frames, at least."""
PATIENCE = 10.0
"""Seconds without anybody asking for a picture, after which a drawing ends."""
STOPPED = "stopped"
"""What is said of a drawing that somebody ends."""

Frame = TypeVar("Frame")


class Stopped(Exception):
    """Raised in a drawing that nobody wants any more."""


class Job(Generic[Frame]):
    """Does some work, and hands its frames on.

    Args:
        work: called with a function that it calls with each frame; that raises `Stopped` when the
            work is to end. It returns the last frame.
        turn: held while the work is done, so that others wait.
    """

    def __init__(
        self, work: Callable[[Callable[[Frame], None]], Frame], turn: threading.Lock
    ) -> None:
        self._work, self._turn = work, turn
        self._news = threading.Condition()
        self._frame: Frame | None = None
        self._count, self._ended, self._finished, self.stopped = 0, False, False, False
        self._error: BaseException | None = None
        self._why = STOPPED
        self._asked = time.monotonic()
        # A program that ends does not wait for a drawing.
        self._thread = threading.Thread(target=self._run, name="drawing", daemon=True)

    def frames(self) -> Iterator[Frame]:
        """The newest frame, whenever there is a newer one; the last one of a finished work always.

        Raises:
            Stopped: where the work has ended before its last frame.
            whatever the work has raised.
        """
        self._thread.start()
        seen = 0
        try:
            while True:
                with self._news:
                    while self._count == seen and not self._ended:
                        self._asked = time.monotonic()
                        self._news.wait(0.5)
                    self._asked = time.monotonic()
                    frame, count, ended = self._frame, self._count, self._ended
                if frame is not None and count > seen:
                    seen = count
                    yield frame
                    with self._news:
                        self._news.wait_for(lambda: self._ended, PAUSE)
                elif ended:
                    break
        finally:
            self.stop()
            self._thread.join()
        if self._error is not None:
            raise self._error
        if not self._finished:
            raise Stopped(self._why)

    def stop(self, why: str = STOPPED) -> None:
        """Let the work end at its next frame; from any thread.

        Args:
            why: what `Stopped` says.
        """
        if not self.stopped and not self._ended:
            self.stopped, self._why = True, why

    def show(self, frame: Frame) -> None:
        """Hand a frame on.

        Raises:
            Stopped: where the work is to end.
        """
        self.check()
        self._publish(frame)

    def check(self, _: object = None) -> None:
        """Raise `Stopped` where the work is to end."""
        if self.stopped or time.monotonic() - self._asked > PATIENCE:
            raise Stopped

    def _publish(self, frame: Frame) -> None:
        with self._news:
            self._frame, self._count = frame, self._count + 1
            self._news.notify_all()

    def _run(self) -> None:
        try:
            while not self._turn.acquire(timeout=0.1):
                self.check()
            try:
                self.check()
                self._publish(self._work(self.show))
                self._finished = True
            finally:
                self._turn.release()
        except Stopped:
            self.stopped = True
        except BaseException as error:
            self._error = error
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()
