"""The progress bar: images/s on a terminal, nothing elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from imagegen.core.progress import image_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_images_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with image_progress("sampling", 4) as advance:
        for _ in range(16):
            advance(0.25)
    shown = terminal.getvalue()
    assert "sampling" in shown
    assert "4/4" in shown
    assert "images/s" in shown


def test_elsewhere_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with image_progress("sampling", 4) as advance:
        advance(4)
    assert capsys.readouterr() == ("", "")
