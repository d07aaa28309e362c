"""Build our own classes from plain dictionaries, as configs and checkpoints hold them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from imagegen.core.durations import parse_duration
from imagegen.core.errors import UserError
from imagegen.core.moved import current_name

T = TypeVar("T")

_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "switches"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a word", "words"),
    NoneType: ("null", "nulls"),
}
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
    target = current_name(target)
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
        UserError: for a target outside this package, options that the class does not know, or
            values that are not of the kind that it takes.
    """
    options = {key: value for key, value in config.items() if key != "_target_"}
    cls = resolve_target(config.get("_target_"), base)
    known = _parameters(cls)
    given = {**options, **kwargs}
    unknown = [name for name in options if name not in known]
    missing = [name for name, option in known.items() if option.needed and name not in given]
    if unknown or missing:
        problem = f"does not know {unknown[0]}" if unknown else f"needs {missing[0]}"
        offered = [name for name in known if name not in kwargs]
        raise UserError(
            f"{cls.__name__} {problem}; its options are {', '.join(offered) or 'none'}."
        )
    _check_kinds(cls.__name__, given, {name: option.hint for name, option in known.items()})
    return cls(**given)


def check_options(what: str, function: Any, given: Mapping[str, Any]) -> None:
    """Check that values are of the kinds that a function's annotations name.

    Annotations of other things than numbers, switches, words, sections and lists of them say
    nothing here.

    Args:
        what: the function in a user's words.
        function: its annotations count; or a data class, those of its fields.
        given: values by the names of its arguments.

    Raises:
        UserError: for the first value of another kind.
    """
    _check_kinds(what, given, get_type_hints(function))


def check_section(section: str, node: Mapping[str, Any]) -> None:
    """As `check_options`, for the `_target_` of a section.

    Classes may take any value at first, and fail when the run comes to use it. A target that cannot
    be found, or whose annotations cannot, is left to tell that itself.

    Raises:
        UserError: for the first value of another kind than its argument's annotation.
    """
    given = {name: value for name, value in node.items() if not name.startswith("_")}
    _check_kinds(section, given, hints_of(node))


def admits(node: Mapping[str, Any], name: str, value: object) -> bool:
    """Whether the class of a section may take this value for its argument `name`.

    An annotation of other things than plain kinds says nothing, as in `check_section`.
    """
    kinds = _kinds(hints_of(node).get(name))
    return not kinds or any(_is(value, kind) for kind in kinds)


def times_in(section: str, node: Mapping[str, Any]) -> dict[str, timedelta]:
    """The options of a section that its class takes as a `timedelta`, made of their words.

    Raises:
        UserError: for a word that is not a duration.
    """
    return {
        name: parse_duration(f"{section}.{name}", value)
        for name, hint in hints_of(node).items()
        if (value := node.get(name)) is not None
        and timedelta in (hint, *get_args(hint))
        and str not in get_args(hint)
    }


def build_section(node: Any, section: str, kind: Any) -> Any:
    """What a section of the configuration describes by its `_target_`.

    Raises:
        UserError: where that is something else than a `kind`, or an option is of another kind than
            what it describes takes.
    """
    from hydra.utils import instantiate

    if isinstance(node, Mapping):
        node = {**node, "_target_": current_name(node.get("_target_"))}
        check_section(section, node)
    times = times_in(section, node) if isinstance(node, Mapping) else {}
    # Plain lists: a checkpoint keeps them, and is read without any other class.
    found = instantiate(node, _convert_="all", **times)
    if not isinstance(found, kind):
        target = node.get("_target_") if isinstance(node, Mapping) else node
        raise UserError(
            f"{section}._target_={target} gives a {type(found).__name__}, but {section} must be a "
            f"{kind.__name__}."
        )
    return found


def hints_of(node: Any) -> dict[str, Any]:
    """The annotations of a section's `_target_`; none where it, or they, cannot be found."""
    from hydra.utils import get_object

    if node.get("_target_") is None:
        return {}
    try:
        found = get_object(str(node["_target_"]))
        return get_type_hints(found.__init__ if inspect.isclass(found) else found)
    except Exception:
        return {}


def _check_kinds(what: str, given: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    for name, value in given.items():
        kinds = _kinds(hints.get(name))
        if kinds and not any(_is(value, kind) for kind in kinds):
            wanted = " or ".join(_words(kind) for kind in kinds)
            raise UserError(f"{what} takes {name} as {wanted}, not {value!r}.")


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The kinds of value that an annotation admits, if it is made of plain ones only."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return kinds if all(map(_is_plain, kinds)) else ()


def _is_plain(kind: Any) -> bool:
    if get_origin(kind) is Sequence:
        return all(map(_is_plain, get_args(kind)))
    return kind in _WORDS or get_origin(kind) is Mapping


def _words(kind: Any, several: bool = False) -> str:
    if get_origin(kind) is Sequence:
        inside = _words(get_args(kind)[0], several=True)
        return f"lists of {inside}" if several else f"a list of {inside}"
    if get_origin(kind) is Mapping:
        return "sections" if several else "a section of options"
    return _WORDS[kind][several]


def _is(value: object, kind: Any) -> bool:
    if get_origin(kind) is Sequence:
        (inside,) = get_args(kind)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            return False
        return all(_is(item, inside) for item in value)
    if get_origin(kind) is Mapping:
        return isinstance(value, Mapping)
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, kind)


class _Option(NamedTuple):
    needed: bool
    hint: Any


def _parameters(cls: type) -> dict[str, _Option]:
    """What the constructor takes: names, whether each must be given, and annotations.

    A constructor with **context passes what it does not know on to that of the class it extends.
    """
    names: dict[str, _Option] = {}
    for ancestor in cls.__mro__:
        if "__init__" not in vars(ancestor):
            continue
        passes_on = False
        constructor = vars(ancestor)["__init__"]
        hints = get_type_hints(constructor)
        for name, parameter in list(inspect.signature(constructor).parameters.items())[1:]:
            if parameter.kind is parameter.VAR_KEYWORD:
                passes_on = True
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                option = _Option(parameter.default is parameter.empty, hints.get(name))
                names.setdefault(name, option)
        if not passes_on:
            break
    return names
