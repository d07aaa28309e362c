"""Whether a clone of the repository runs or an installed package, and what follows from that."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]

IN_CLONE = not (PACKAGE / "conf").is_dir()
"""In a clone, conf/ is at the top; a wheel has it inside the package."""

CONF = (PACKAGE.parent if IN_CLONE else PACKAGE) / "conf"
"""The configurations that come with the package."""

PROJECT_ROOT = PACKAGE.parent if IN_CLONE else Path.cwd()
"""The folder that holds data/ and outputs/: the clone or, without one, the working directory."""


def typed(command: str) -> str:
    """What a user types to run `command`, one of `imagegen.commands.registry`.

    In a clone, training and sampling have a script of their own.
    """
    if IN_CLONE and command in ("train", "sample") and not sys.argv[0].startswith("imagegen "):
        return f"python {command}.py"
    return f"imagegen {command}"


def shipped_models() -> list[Path]:
    """Folders of the trained models that come with the clone."""
    found = PACKAGE.parent.glob("models/*/config.json") if IN_CLONE else ()
    return sorted(config.parent for config in found)


def pip_install(extra: str, packages: str) -> str:
    """The command that installs an optional part.

    Args:
        extra: its name in pyproject.toml, which only a clone can refer to.
        packages: what it consists of, separated by spaces.
    """
    return f"pip install -e '.[{extra}]'" if IN_CLONE else f"pip install {packages}"
