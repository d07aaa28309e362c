"""Times as people read them."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """1:02:03, or 02:03 below an hour."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"
