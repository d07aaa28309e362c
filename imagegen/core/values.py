"""Values that a user typed for `sample.py`, `imagegen evaluate`, …: checked, then given their type.

Each check raises a `UserError` of one sentence that names the option and what it takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from imagegen.core.errors import UserError

if TYPE_CHECKING:
    import torch

MAX_SEED = 2**64 - 1


def whole_number(value: object, name: str, least: int, most: int | None = None) -> int:
    """`value` as an int, `least` to `most`."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < least
        or (most is not None and value > most)
    ):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UserError(f"{name}={as_typed(value)}, but it must be a whole number {bounds}.")
    return value


def optional_whole_number(value: object, name: str, least: int) -> int | None:
    """`value` as an int of at least `least`; None stays None."""
    return None if value is None else whole_number(value, name, least)


def positive_number(value: object, name: str) -> float:
    """A finite number above 0."""
    number = real(value)
    if number is None or not math.isfinite(number) or number <= 0:
        raise UserError(f"{name}={as_typed(value)}, but it must be a number above 0.")
    return number


def share(value: object, name: str) -> float:
    """A share from 0 (nothing) to below 1 (all)."""
    number = real(value)
    if number is None or not 0 <= number < 1:
        raise UserError(
            f"{name}={as_typed(value)}, but it must be a share of the rows: from 0 (nothing "
            "visible) to below 1, so that something is left to draw."
        )
    return number


def choice(value: object, name: str, known: Sequence[str]) -> str:
    """One of the `known` words."""
    if value not in known:
        raise UserError(f"{name}={as_typed(value)} is unknown; it can be {', '.join(known)}.")
    return str(value)


def flag(value: object, name: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise UserError(f"{name}={as_typed(value)}, but it must be true or false.")
    return value


def paths(value: object, name: str) -> tuple[Path, ...]:
    """One or more paths, absolute."""
    values = as_list(value)
    typed = [str(path) for path in ([value] if values is None else values)]
    if not typed or not all(path.strip() for path in typed):
        raise UserError(f"{name} is empty; give an image file, a folder, or a list of them.")
    return tuple(absolute(path) for path in typed)


def checkpoint_path(value: object) -> str:
    """The `ckpt` option, which has no default."""
    if value is None or not str(value).strip():
        raise UserError("ckpt is missing; add ckpt=<checkpoint file or run folder>.")
    return str(value)


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that Hydra composed as plain dictionaries, lists, numbers and strings."""
    from omegaconf import DictConfig, OmegaConf

    if not isinstance(config, DictConfig):
        return dict(config)
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))


def as_list(value: object) -> list[Any] | None:
    """A list of what was typed as a list; None for a single value."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    return None


def resolve_device(value: object) -> torch.device:
    """`auto` (CUDA where there is one, else the CPU), `cpu`, `mps`, `cuda` or `cuda:<number>`.

    A Mac's GPU is taken only where it is named: images are drawn there by PyTorch's own steps, and
    each of them waits for the GPU, while the CPU has compiled loops.
    """
    import torch

    if value == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name, _, index = str(value).partition(":")
    if name not in ("cpu", "cuda", "mps") or (index and not (name == "cuda" and index.isdecimal())):
        raise UserError(
            f"device={as_typed(value)} is unknown; it can be auto, cpu, cuda, cuda:0 or mps."
        )
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError(
            "device=mps, but PyTorch finds no GPU of a Mac here; use device=cpu or device=auto."
        )
    if name == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device={value}, but PyTorch finds {torch.cuda.device_count()} CUDA devices here; "
            "use device=cpu or device=auto."
        )
    return torch.device(str(value))


def out_folder(value: object, parent: str) -> Path:
    """The `out` option: absolute path of a folder; a new `<parent>/<date>-<time>` for null."""
    if value is None:
        # To the millisecond: jobs are started side by side.
        name = f"{datetime.now():%Y-%m-%d-%H%M%S-%f}"
        return absolute(Path(parent) / name[:-3])
    if not str(value).strip():
        raise UserError(f"out is empty; name a folder, such as out={parent}/first.")
    return one_path(value, "out")


def one_path(value: object, name: str) -> Path:
    """One path, absolute."""
    if isinstance(value, Mapping) or as_list(value) is not None or not str(value).strip():
        raise UserError(f"{name}={as_typed(value)}, but it must be one path.")
    return absolute(str(value))


def absolute(path: str | Path) -> Path:
    """`path` from the current folder, `~` expanded, links kept."""
    return Path.cwd() / Path(path).expanduser()


def real(value: object) -> float | None:
    """A number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return float(value)


def as_typed(value: object) -> str:
    """`value` as a user types it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_typed(each)}" for key, each in value.items()) + "}"
    if (values := as_list(value)) is not None:
        return f"[{','.join(map(as_typed, values))}]"
    return str(value)
