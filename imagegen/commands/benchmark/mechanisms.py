"""The mechanisms of `conf/attention/` that a benchmark compares, and the options they come with."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from imagegen.cli.entry import conf_folder
from imagegen.core import values as opt
from imagegen.core.errors import UserError

VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "gated_delta": ({"gate": "head"}, {"gate": "channel"}),
    # With softmax in its pattern a hybrid grows as softmax does.
    "hybrid": ({"pattern": ["linear", {"name": "local", "window": 64}]},),
    "linear": tuple({"feature_map": name} for name in ("elu", "favor", "polynomial2", "taylor2")),
    "lsh": ({"rounds": 1}, {"rounds": 4}),
}
"""Options that make a mechanism another one; those not listed come as their file says."""


@dataclass(frozen=True)
class Mechanism:
    """A mechanism under the name it has in a table.

    Attributes:
        name: `linear`, or `linear feature_map=favor`.
        config: its `_target_` and options.
    """

    name: str
    config: dict[str, Any]


def choose(value: object) -> list[Mechanism]:
    """The mechanisms that the option `mechanisms` asks for; all of them, softmax first, for None.

    Raises:
        UserError: for an empty list, a name that is none, or one that comes twice.
    """
    if value is None:
        names = sorted(_files(), key=lambda name: (name != "softmax", name))
        return [_make(name, options) for name in names for options in VARIANTS.get(name, ({},))]
    chosen = [_entry(entry) for entry in _listed(value)]
    if not chosen:
        raise UserError("mechanisms is an empty list; leave it out for all of them.")
    names = [mechanism.name for mechanism in chosen]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"mechanisms holds {name} twice; name it once.")
    return chosen


def check(mechanism: Mechanism, layers: int, **context: Any) -> None:
    """Build the mechanism once for each layer, so that a wrong option is refused before work.

    Args:
        context: what `CausalAttention` takes.

    Raises:
        UserError: saying what is wrong.
    """
    from imagegen.attention.base import CausalAttention
    from imagegen.core.build import build

    try:
        for layer in range(layers):
            build(mechanism.config, CausalAttention, layer=layer, **context)
    except (TypeError, ValueError) as error:
        raise UserError(f"mechanisms: {mechanism.name} is refused: {error}.") from error


def _listed(value: object) -> list[Any]:
    found = opt.as_list(value)
    return [value] if found is None else found


def _entry(entry: object) -> Mechanism:
    options = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
    name, known = options.pop("name", None), _files()
    if name not in known:
        near = difflib.get_close_matches(str(name), known, 3)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(
            f"mechanisms holds {typed(entry)}, which names no mechanism; {meant}choose from "
            f"{', '.join(sorted(known))}, or give options as {{name:lsh,rounds:4}}."
        )
    return _make(name, options)


def _files() -> list[str]:
    return [path.stem for path in (conf_folder() / "attention").glob("*.yaml")]


def _make(name: str, options: Mapping[str, Any]) -> Mechanism:
    from omegaconf import OmegaConf

    found = OmegaConf.load(conf_folder() / "attention" / f"{name}.yaml")
    config = {**cast(dict[str, Any], OmegaConf.to_container(found, resolve=True)), **options}
    label = " ".join([name, *(f"{key}={typed(value)}" for key, value in options.items())])
    return Mechanism(label, config)


def typed(value: object) -> str:
    """`value` as it is typed on the command line."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{typed(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(typed, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
