"""The options of runs, as their folders keep them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from imagegen.core.installation import CONF
from imagegen.core.moved import current_name
from imagegen.core.values import as_typed

_PLACES = ("resume", "dataset.root", "dataset.cache", "dataset.download", "logger")
_ENDINGS = (".dirpath", ".folder")


def options_of(folder: Path) -> dict[str, str]:
    """All options of a run by name, each as it is typed; none if its config.yaml is damaged.

    Options that say where files are, and what is logged where, are left out.
    """
    return {
        name: value
        for name, value in _flat(_mapping(folder / "config.yaml"))
        if not name.endswith(_ENDINGS)
        and not any(name == place or name.startswith(f"{place}.") for place in _PLACES)
    }


def differences(folders: Sequence[Path]) -> dict[str, list[str | None]]:
    """The options in which runs differ, in the order of their configurations.

    An option that only some of the runs have, such as one of an attention mechanism, differs if it
    does among these.

    Args:
        folders: of the runs.

    Returns:
        For each option its value in each run; None in runs that do not have it.
    """
    options = [options_of(folder) for folder in folders]
    names = dict.fromkeys(name for each in options for name in each)
    values = {name: [each.get(name) for each in options] for name in names}
    return {name: found for name, found in values.items() if len({*found} - {None}) > 1}


def images_per_step(folder: Path) -> float:
    """Images of an optimizer step, of all processes together; NaN where a run does not tell.

    Runs of earlier versions did not write down their number of processes.
    """
    config, summary = _mapping(folder / "config.yaml"), _mapping(folder / "summary.json")
    trainer = config.get("trainer")
    if not isinstance(trainer, Mapping):
        return math.nan
    processes = summary.get("processes")
    if processes is None and (trainer.get("devices"), trainer.get("num_nodes", 1)) == (1, 1):
        processes = 1
    factors = [config.get("batch_size"), trainer.get("accumulate_grad_batches", 1), processes]
    if not all(isinstance(factor, int) for factor in factors):
        return math.nan
    return float(math.prod(factors))


def _mapping(path: Path) -> dict[str, Any]:
    """What a file of YAML, or of JSON, holds; nothing if it is damaged."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _flat(config: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping):
            yield from _flat(value, name)
        elif key == "_target_":
            yield above, _choice(above, str(current_name(value)))
        else:
            yield name, as_typed(value)


def _choice(group: str, target: str) -> str:
    """What is typed for a class: its file in conf/, or else its name."""
    return _choices(group).get(target, target.rpartition(".")[2])


@cache
def _choices(group: str) -> dict[str, str]:
    files = sorted((CONF / group).glob("*.yaml"))
    return {str(_mapping(file).get("_target_")): file.stem for file in files}
