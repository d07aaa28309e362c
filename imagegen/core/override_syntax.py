"""Options as they are typed, `key=value`: written, read, and looked for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def quote(value: str) -> str:
    """`value` as Hydra reads it back unchanged on the right of an override's `=`."""
    from hydra.core.override_parser.types import Quote, QuotedString

    # OmegaConf would take ${...} for an interpolation.
    return QuotedString(value.replace("${", "\\${"), Quote.single).with_quotes()


def shown(folder: Path) -> str:
    """The folder as it is shown, relative where that is shorter."""
    path = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return str(path)


def argument(name: str, folder: Path) -> str:
    """`name=folder` as a user can type it in a shell, for Hydra to read."""
    path = shown(folder)
    if all(char.isalnum() or char in "/._-+:" for char in path):
        return f"{name}={path}"
    return in_shell(f"{name}={quote(path)}")


def in_shell(text: str) -> str:
    """An argument as it is typed in a shell."""
    if shlex.quote(text) == text or any(char in '"$`\\!' for char in text):
        return shlex.quote(text)
    return f'"{text}"'


def touched(key: str, overrides: Sequence[str]) -> bool:
    """Whether any of the overrides names the option, or a section or group that it belongs to."""
    names = [str(parsed.key_or_group) for text in overrides if (parsed := parse_override(text))]
    return any(key == name or key.startswith(f"{name}.") for name in names)


def parse_override(text: str) -> Any:
    """The override parsed, or None for flags and what Hydra will refuse."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if text.startswith("-"):
        return None
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None
