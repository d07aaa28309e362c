"""The options of `imagegen page`, checked before anything is loaded."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagegen.core import values as opt
from imagegen.core.errors import UserError
from imagegen.core.installation import shipped_models
from imagegen.tracking.runs_table import RUNS


@dataclass(frozen=True)
class PageOptions:
    """Which models the page shows, and who may open it.

    Attributes:
        ckpts: checkpoint files or run folders, the first of which is shown first.
        host: address that the server listens at.
        port: of the server.
        password: that visitors type; None lets everyone in who can reach the host.
        device: see `imagegen.core.values.resolve_device`.
        runs: folder whose runs the page shows; the usual one need not exist yet.
        dataset: options of the models' data sets to change, for their test images.
        open: whether a browser is opened.
    """

    ckpts: tuple[str, ...]
    host: str
    port: int
    password: str | None
    device: str
    runs: Path
    dataset: Mapping[str, Any] = field(default_factory=dict)
    open: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PageOptions:
        """Check the plain values of `conf/page.yaml`.

        Raises:
            UserError: naming the first option that cannot be.
        """
        host = str(config["host"]).strip()
        given = config["password"]
        password = None if given is None else str(given)
        if password is not None and not password.strip():
            raise UserError("password is empty; give a word, or leave it out.")
        if password is None and not is_this_machine(host):
            raise UserError(
                f"host={host} lets other machines open the page; add password=<a word> that "
                "visitors have to type, or leave host out."
            )
        runs = RUNS if config["runs"] is None else opt.one_path(config["runs"], "runs")
        if config["runs"] is not None and not runs.is_dir():
            raise UserError(f"runs={runs} is not a folder; name one that holds runs.")
        return cls(
            ckpts=_checkpoints(config["ckpt"]),
            host=host,
            port=opt.whole_number(config["port"], "port", 1, 65535),
            password=password,
            device=str(config["device"]),
            runs=runs,
            dataset=dict(config["dataset"]),
            open=opt.flag(config["open"], "open"),
        )


def _checkpoints(typed: object) -> tuple[str, ...]:
    """The one that is typed, if any, and those that come with the project."""
    here = Path.cwd()
    known = [
        path.relative_to(here) if path.is_relative_to(here) else path for path in shipped_models()
    ]
    if typed is None and known:
        return tuple(map(str, known))
    chosen = opt.checkpoint_path(typed)
    same = Path(chosen).resolve()
    return (chosen, *(str(path) for path in known if path.resolve() != same))


def is_this_machine(host: str) -> bool:
    """Whether only programs of this machine reach a server at this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
