"""What the benchmarks of whole models compare, under the names it has as an option."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

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
        UserError: for an empty list, a name that is none, one that comes twice, or a peer that is
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
                f"contestants holds {name}, which is none; {meant}choose from {', '.join(known)}."
            )
        if names.count(name) > 1:
            raise UserError(f"contestants holds {name} twice; name it once.")
        if _is_peer(name) and not is_installed():
            raise UserError(f"contestants holds {name}, but {INSTALL}")
    return {name: known[name] for name in names}


def _is_peer(name: str) -> bool:
    return name.startswith("peer_")
