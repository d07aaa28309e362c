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
    known = _parameters(cls)
    given = {**options, **kwargs}
    unknown = [name for name in options if name not in known]
    missing = [name for name, needed in known.items() if needed and name not in given]
    if unknown or missing:
        problem = f"does not know {unknown[0]}" if unknown else f"needs {missing[0]}"
        offered = [name for name in known if name not in kwargs]
        raise UserError(
            f"{cls.__name__} {problem}; its options are {', '.join(offered) or 'none'}."
        )
    return cls(**given)


def _parameters(cls: type) -> dict[str, bool]:
    """Names that the constructor takes, and whether each must be given.

    A constructor with **context passes what it does not know on to that of the class it extends.
    """
    names: dict[str, bool] = {}
    for ancestor in cls.__mro__:
        if "__init__" not in vars(ancestor):
            continue
        passes_on = False
        for name, parameter in list(
            inspect.signature(vars(ancestor)["__init__"]).parameters.items()
        )[1:]:
            if parameter.kind is parameter.VAR_KEYWORD:
                passes_on = True
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                names.setdefault(name, parameter.default is parameter.empty)
        if not passes_on:
            break
    return names
