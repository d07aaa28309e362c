"""What `--help` says of a command's options: the comments beside them in its file in conf/.

A comment that starts a line is a heading for the options below it.
"""

from __future__ import annotations

import re
import textwrap

WIDTH = 100
_OPTION = re.compile(r"( *)(\w+):(?: +([^# ][^#]*?))?(?: +# (.+))?")


def options_of(text: str) -> list[tuple[str, str | None, str]]:
    """The options of a command's file: name, default as it is typed, and description.

    Args:
        text: of the file: a head and its list of defaults, the options, then the section `hydra`;
            empty lines are between these.

    Returns:
        The options and the headings, in order; a heading has an empty name, the default None means
        null.
    """
    found: list[tuple[str, str | None, str]] = []
    section = ""
    for line in text.partition("\nhydra:")[0].split("\n\n", 2)[2].splitlines():
        if line.startswith("#"):
            found.append(("", None, line[2:]))
        elif line.lstrip().startswith("#"):
            name, default, what = found[-1]
            found[-1] = name, default, f"{what} {line.lstrip(' #')}"
        elif match := _OPTION.fullmatch(line.rstrip()):
            indent, name, value, what = match.groups()
            section = section if indent else name
            if value is not None:
                default = None if value == "null" else value.replace(", ", ",")
                full = f"{section}.{name}" if indent else name
                found.append((full, default, what or ""))
    return found


def described(text: str) -> str:
    """Those options in lines for a help, aligned, each with its default."""
    options = options_of(text)
    column = 4 + max(len(name) for name, _, _ in options)
    lines: list[str] = []
    for name, default, what in options:
        if not name:
            lines += ["", what]
            continue
        full = what if default is None else f"{what} (default {default})"
        wrapped = textwrap.wrap(full, WIDTH - column, break_on_hyphens=False)
        head = f"  {name:{column - 2}}"
        lines += [head + wrapped[0], *(" " * column + line for line in wrapped[1:])]
    # Hydra takes a dollar sign for a variable of its own.
    return "\n".join(lines).replace("$", "$$")
