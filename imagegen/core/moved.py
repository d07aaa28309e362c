"""Names of earlier versions, and what they are called now.

Checkpoints and typed options keep names of classes forever; commands had modules as names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

MODULES = {
    "imagegen.averaging": "imagegen.training.averaging",
    "imagegen.callbacks": "imagegen.training.callbacks",
    "imagegen.embedding": "imagegen.model.embeddings",
    "imagegen.loggers": "imagegen.tracking.loggers",
    "imagegen.muon": "imagegen.training.muon",
    "imagegen.normalizer_watch": "imagegen.training.normalizer_watch",
    "imagegen.schedules": "imagegen.training.schedules",
    "imagegen.sweeps": "imagegen.tracking.sweeps",
}
"""Modules whose classes were named as a `_target_`, by their former names."""

NAMES = {
    "imagegen.training.callbacks.StopWhole": "imagegen.training.stopping.StopWhole",
    "imagegen.training.callbacks.early_stopping": "imagegen.training.stopping.early_stopping",
}
"""Single classes and functions that have left their module since, by the names there."""

COMMANDS = {
    "imagegen.benchmark": "imagegen benchmark",
    "imagegen.codec": "imagegen compress (or decompress)",
    "imagegen.evaluate": "imagegen evaluate",
    "imagegen.export": "imagegen export",
    "imagegen.find_lr": "imagegen find-lr",
    "imagegen.machine": "imagegen machine",
    "imagegen.runs": "imagegen runs",
    "imagegen.verify": "imagegen verify",
}
"""What to type for `python -m NAME`, by the former names."""


def current_name(target: object) -> object:
    """A `_target_` under its present name; anything else unchanged."""
    module, _, name = str(target).rpartition(".")
    found = f"{MODULES[module]}.{name}" if module in MODULES else target
    return NAMES.get(str(found), found)


def with_current_names(config: Any) -> Any:
    """A copy of plain containers in which every `_target_` has its present name."""
    if isinstance(config, dict):
        return {
            key: current_name(value) if key == "_target_" else with_current_names(value)
            for key, value in config.items()
        }
    return [*map(with_current_names, config)] if isinstance(config, list) else config


class FormerCommands:
    """Import hook: `python -m imagegen.evaluate` says in a sentence what to type now."""

    @staticmethod
    def find_spec(name: str, path: Iterable[str] | None, target: object = None) -> None:
        """Refuse the former names where they are run as a program.

        Raises:
            SystemExit: for those.
        """
        if name in COMMANDS and sys.argv[:1] == ["-m"]:
            sys.exit(
                f"error: python -m {name} is called {COMMANDS[name]!r} now; type that instead."
            )
