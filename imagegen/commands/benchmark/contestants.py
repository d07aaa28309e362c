"""What the benchmarks of whole models compare, under the names it has as an option."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from imagegen.cli.entry import conf_folder
from imagegen.core import values as opt
from imagegen.core.errors import UserError

PEER = "fast-transformers"


@dataclass(frozen=True)
class Drawer:
    """A way to generate.

    Attributes:
        title: its name in a table.
        attention: `linear` or `softmax`.
        form: `compiled` (the loop that sample.py takes), `step` (PyTorch's operations),
            `recomputed` (the parallel form over all of the prefix, no state), or `peer`.
        precision: of the compiled loop's weights.
    """

    title: str
    attention: str
    form: str
    precision: str = "auto"


@dataclass(frozen=True)
class Trainer:
    """A way to train.

    Attributes:
        title: its name in a table.
        attention: `linear` or `softmax`.
        peer: whether it is another library's.
        bf16: whether the forward pass runs under bf16 autocast.
    """

    title: str
    attention: str
    peer: bool = False
    bf16: bool = False


DRAWERS = {
    "linear": Drawer("linear", "linear", "compiled"),
    "linear_32": Drawer("linear precision=32", "linear", "compiled", "32"),
    "linear_step": Drawer("linear, PyTorch step", "linear", "step"),
    "softmax": Drawer("softmax, cached", "softmax", "compiled"),
    "softmax_step": Drawer("softmax, cached, PyTorch step", "softmax", "step"),
    "softmax_recomputed": Drawer("softmax, recomputed", "softmax", "recomputed"),
    "peer_linear": Drawer(f"{PEER} linear", "linear", "peer"),
    "peer_softmax": Drawer(f"{PEER} softmax, cached", "softmax", "peer"),
}
TRAINERS = {
    "linear": Trainer("linear", "linear"),
    "linear_bf16": Trainer("linear, bf16-mixed", "linear", bf16=True),
    "softmax": Trainer("softmax", "softmax"),
    "peer_linear": Trainer(f"{PEER} causal-linear", "linear", peer=True),
    "peer_softmax": Trainer(f"{PEER} softmax", "softmax", peer=True),
}

T = TypeVar("T")


def choose_contestants(value: object, known: Mapping[str, T]) -> dict[str, T]:
    """Those that the option `contestants` names; all of them for None.

    Where the peer is not installed, None leaves it out.

    Raises:
        UserError: for an empty list, an unknown name, one that comes twice, or a peer that is
        not installed.
    """
    from imagegen.commands.benchmark.peer_library import INSTALL, is_installed

    if value is None:
        installed = is_installed()
        return {name: one for name, one in known.items() if installed or not _is_peer(name)}
    listed = opt.as_list(value)
    names = [str(name) for name in ([value] if listed is None else listed)]
    if not names:
        raise UserError("contestants is an empty list; leave it out for all of them.")
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"contestants holds {name}, which does not exist; {meant}"
                f"choose from {', '.join(known)}."
            )
        if names.count(name) > 1:
            raise UserError(f"contestants holds {name} twice; name it once.")
        if _is_peer(name) and not is_installed():
            raise UserError(f"contestants holds {name}, but {INSTALL}")
    return {name: known[name] for name in names}


def _is_peer(name: str) -> bool:
    return name.startswith("peer_")


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


def choose_mechanisms(value: object) -> list[Mechanism]:
    """The mechanisms that the option `mechanisms` names; all of them, softmax first, for None.

    Raises:
        UserError: for an empty list, an unknown name, or one that comes twice.
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


def check_mechanism(mechanism: Mechanism, layers: int, **context: Any) -> None:
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
