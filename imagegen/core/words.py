"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """Such as "1 run" and "2 runs", for words whose plural ends in s."""
    return f"{number} {what}" + ("" if number == 1 else "s")
