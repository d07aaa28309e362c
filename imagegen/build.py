"""Build our own classes from plain dictionaries, as configs and checkpoints hold them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from imagegen.errors import UserError

T = TypeVar("T")

_TARGET = re.compile(r"imagegen(\.[a-z_][a-z0-9_]*)+\.[A-Z][A-Za-z0-9]*")


def resolve_target(target: object, base: type[T]) -> type[T]:
    """The class that `target` names.

    A checkpoint may come from anywhere, so only classes of this package that extend `base` are
    accepted: nothing else is even imported.

    Raises:
        UserError: for any other target.
    """
    refusal = UserError(
        f"_target_ {target!r} is not one of imagegen's {base.__name__} classes; "
        "only those can be built from a config or a checkpoint."
    )
    if not isinstance(target, str) or not _TARGET.fullmatch(target):
        raise refusal
    module_name, _, class_name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ModuleNotFoundError as error:
        raise refusal from error
    if not inspect.isclass(found) or not issubclass(found, base):
        raise refusal
    return found


def build(config: Mapping[str, Any], base: type[T], **kwargs: Any) -> T:
    """Build an instance of `config["_target_"]` with the config's other entries and `kwargs`.

    Raises:
        UserError: for a target outside this package, or options that the class does not know.
    """
    options = {key: value for key, value in config.items() if key != "_target_"}
    cls = resolve_target(config.get("_target_"), base)
    try:
        inspect.signature(cls).bind(**options, **kwargs)
    except TypeError as error:
        known = [name for name in inspect.signature(cls).parameters if name != "context"]
        raise UserError(
            f"{cls.__name__} cannot be built: {error}; it takes {', '.join(known)}."
        ) from error
    return cls(**options, **kwargs)
