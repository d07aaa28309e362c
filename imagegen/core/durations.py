"""Times as people read them."""

from __future__ import annotations

from datetime import timedelta

from imagegen.core.errors import UserError


def format_seconds(seconds: float) -> str:
    """1:02:03, or 02:03 below an hour."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def parse_duration(name: str, text: object) -> timedelta:
    """The time that "days:hours:minutes:seconds" means.

    Args:
        name: of the option, for the errors.
        text: as it was typed.

    Raises:
        UserError: for another form, and for no time at all.
    """
    parts = str(text).split(":")
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        raise UserError(f"{name}={text} must be days:hours:minutes:seconds, such as 00:00:30:00.")
    days, hours, minutes, seconds = map(int, parts)
    duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if not duration:
        raise UserError(f"{name}={text} leaves no time to train; give at least a second.")
    return duration


def duration_text(duration: timedelta) -> str:
    """The inverse of `parse_duration`, in whole seconds."""
    minutes, seconds = divmod(duration.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{duration.days:02}:{hours:02}:{minutes:02}:{seconds:02}"
