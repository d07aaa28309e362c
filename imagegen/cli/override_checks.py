"""Check what a user typed on the command line before anything runs or is written.

Hydra's own messages are for programmers. Here each mistake becomes a `UserError` of one sentence
that names it and the nearest right names.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from imagegen.core.build import admits, hints_of
from imagegen.core.errors import UserError
from imagegen.core.installation import pip_install
from imagegen.tracking.sweeps import PLUGINS

if TYPE_CHECKING:
    from omegaconf import DictConfig
else:  # The tests' type checker warns of the old-style classes that DictConfig extends.
    DictConfig = Any

OURS = "imagegen."
_FEW = 12
_MOST_COMBINATIONS = 16
_SWEEPS = re.compile(r"sweep$|hydra[./](sweep|sweeper|launcher)([./]|$)")
_NOISE = re.compile(r"\s*(See https://|Set the env|full_key:|object_type=|reference_type=|\^)")


def check_overrides(config_name: str, overrides: Sequence[str], multirun: bool) -> list[DictConfig]:
    """The configurations that `overrides` ask for, one for each choice of groups in a multirun.

    Hydra must be initialised with the config folder. The configurations include the hydra node.

    Raises:
        UserError: for an override that is malformed, names no group, choice or option, or has a
            value of the wrong type.
    """
    loader = GlobalHydra.instance().config_loader()
    parser = OverridesParser.create(config_loader=loader)
    choices: list[list[str]] = []
    settings: list[Override] = []
    parsed = [_parse(parser, text, config_name) for text in overrides]
    # More folders with choices.
    paths = [str(each.input_line) for each in parsed if each.key_or_group == "hydra.searchpath"]
    for override in parsed:
        if override.is_sweep_override() and not multirun:
            raise _sweep_without_multirun(override)
        key = override.key_or_group
        # Groups are folders, with slashes; asking for one takes time.
        options = [] if "." in key else loader.get_group_options(key, overrides=paths)
        if options and not isinstance(_value(override), dict):
            try:
                choices.append(_group_choices(override, options))
            except UserError as error:
                if not any(each.key_or_group == "resume" for each in parsed):
                    raise
                # A checkpoint may come from anywhere, so it cannot say where configuration is.
                again = "Presets of your own are found with the --config-dir of the first start."
                raise UserError(f"{error} {again}") from error
            if override.is_delete():
                _refuse_without(override.key_or_group, config_name, options)
        else:
            settings.append(override)

    configs = []
    fixed = [str(override.input_line) for override in settings if not override.is_sweep_override()]
    for product in itertools.islice(itertools.product(*choices), _MOST_COMBINATIONS):
        chosen = [*product, *paths]
        config = _compose(config_name, chosen)
        for override in settings:
            _check_setting(override, config, config_name)
        if fixed and (multirun or any(_is_of_hydra(override) for override in settings)):
            # That of a single run keeps the order typed: the run uses and records it.
            config = _compose(config_name, [*chosen, *fixed] if multirun else overrides)
        elif fixed:
            _apply(settings, parsed, config)
        configs.append(config)
    return configs


def refuse_without_effect(typed: Sequence[str], multirun: bool) -> None:
    """Refuse what Hydra would ignore: a run's folder in a multirun, a sweep's options elsewhere.

    Args:
        typed: the overrides that the user has typed.
        multirun: whether they are those of a multirun.

    Raises:
        UserError: naming the first such override, and what has the effect that was wanted.
    """
    for text in typed:
        key, _, value = text.lstrip("+").partition("=")
        if multirun and key == "hydra.run.dir":
            raise UserError(
                f"{text!r} names the folder of a single run; with --multirun, name that of all "
                f"runs with hydra.sweep.dir={value}, and those in it, if not 0, 1, 2…, with "
                "hydra.sweep.subdir."
            )
        if not multirun and _SWEEPS.match(key) and value != "null":
            other = "leave it out"
            if key == "hydra.sweep.dir":
                other = f"name the folder of a single run with hydra.run.dir={value}"
            raise UserError(f"{text!r} counts only in a sweep; add --multirun, or {other}.")


def check_values(config: DictConfig) -> None:
    """Check that every mandatory value is given and every interpolation resolves.

    Args:
        config: as `check_overrides` returns it, with the hydra node.

    Raises:
        UserError: naming the options to add, or the interpolation that leads nowhere.
    """
    task = copy.deepcopy(config)
    with read_write(task), open_dict(task):
        del task["hydra"]
    instance = HydraConfig.instance()
    previous = instance.cfg
    try:
        with read_write(config), open_dict(config):
            config.hydra.runtime.output_dir = config.hydra.run.dir
        instance.set_config(config)
        missing = sorted(OmegaConf.missing_keys(task))
        if missing:
            typed = " ".join(f"{key}=<value>" for key in missing)
            verb = "is" if len(missing) == 1 else "are"
            raise UserError(f"{' and '.join(missing)} {verb} not set; add {typed}.")
        OmegaConf.to_container(task, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"the configuration cannot be resolved: {message(error)}") from error
    finally:
        instance.cfg = previous


def message(error: BaseException) -> str:
    """The message of a Hydra or OmegaConf error as one line, without hints for programmers."""
    lines = [line for line in str(error).splitlines() if line.strip() and not _NOISE.match(line)]
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        lines.insert(0, f"{error.full_key}:")
    if not lines and error.__cause__ is not None:
        return message(error.__cause__)
    return " ".join(" ".join(lines).split())


def nearest(name: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The likeliest of dotted `names` that someone meant who typed `name`, best first."""
    names = sorted(each for each in set(names) if not name.startswith(f"{each}."))
    leaf = name.rpartition(".")[2]
    leaves: dict[str, list[str]] = {}
    for candidate in names:
        leaves.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    found = difflib.get_close_matches(name, names, most, cutoff=0.8)
    found += leaves.get(leaf, [])
    for near in difflib.get_close_matches(leaf, leaves, most, cutoff=0.75):
        found += leaves[near]
    found += difflib.get_close_matches(name, names, 1, cutoff=0.65)
    return list(dict.fromkeys(found))[:most]


def suggestion(near: Sequence[str], after: str = "") -> str:
    """`; did you mean a or b?`, or nothing where nothing is near."""
    return f"; did you mean {' or '.join(f'{name}{after}' for name in near)}?" if near else ""


def _known_names(config_name: str) -> list[str]:
    """Names of the groups and options of the default configuration."""
    config = _compose(config_name, [])
    groups = [group for group in config.hydra.runtime.choices if not group.startswith("hydra/")]
    return [*groups, *_flatten(config, skip_hydra=True)]


def _compose(config_name: str, overrides: Sequence[str]) -> DictConfig:
    with _refused_overrides(config_name):
        return compose(config_name, overrides=list(overrides), return_hydra_config=True)


@contextlib.contextmanager
def _refused_overrides(config_name: str) -> Iterator[None]:
    try:
        yield
    # Hydra refuses some overrides with nothing but a ValueError.
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        text = message(error)
        unused = re.match(r"Could not override '([^'@]+)'\. No match in the defaults list", text)
        if unused:
            raise UserError(
                f"{unused[1]} is not an option of {config_name}; --help lists what it takes."
            ) from error
        plugin = re.search(r"Could not find '(hydra/(?:launcher|sweeper)/\w+)'", text)
        if plugin and plugin[1] in PLUGINS:
            package, extra = PLUGINS[plugin[1]]
            how = f"pip install {package}" if extra is None else pip_install(extra, package)
            raise UserError(
                f"this sweep needs the package {package}; install it with {how}."
            ) from error
        raise UserError(f"the configuration cannot be composed: {text}") from error


def _is_of_hydra(override: Override) -> bool:
    key = override.key_or_group
    return key.startswith("hydra.") and key != "hydra.run.dir"


def _apply(settings: list[Override], typed: list[Override], config: DictConfig) -> None:
    """Make of what Hydra composes of the choices what it would compose of all that was typed.

    Composing again would take as long as the first time.
    """
    with _refused_overrides(config.hydra.job.config_name):
        ConfigLoaderImpl._apply_overrides_to_config(settings, config)
        task = [override for override in typed if not override.is_hydra_override()]
        config.hydra.overrides.task = [override.input_line for override in task]
        config.hydra.overrides.hydra = [
            override.input_line for override in typed if override.is_hydra_override()
        ]
        config.hydra.job.override_dirname = get_overrides_dirname(
            task, **config.hydra.job.config.override_dirname
        )


def _parse(parser: OverridesParser, text: str, config_name: str) -> Override:
    key, equals, value = text.partition("=")
    key = key.strip().lstrip("+")
    if not equals and not text.startswith("~"):
        near = nearest(key, _known_names(config_name))
        raise UserError(f"{text!r} is not of the form key=value{suggestion(near, '=<value>')}")
    try:
        return parser.parse_override(text)
    except HydraException as error:
        raise UserError(
            f"{text!r} cannot be read as key=value; quote a value that holds spaces, commas, "
            f"brackets or '=', for instance \"{key}='{value}'\"."
        ) from error


def _value(override: Override) -> Any:
    return None if override.is_sweep_override() or override.is_delete() else override.value()


def _sweep_without_multirun(override: Override) -> UserError:
    text = str(override.input_line)
    key, _, value = text.partition("=")
    if override.value_type == ValueType.SIMPLE_CHOICE_SWEEP:
        return UserError(
            f"{text!r} gives several values: add --multirun to try each in turn, or write "
            f"{key}=[{value}] for one list."
        )
    return UserError(f"{text!r} gives several values: add --multirun to try each in turn.")


def _group_choices(override: Override, options: Sequence[str]) -> list[str]:
    """Overrides that choose one option each; several in a sweep."""
    text, group = str(override.input_line), override.key_or_group
    if override.is_delete():
        return [text]
    swept = override.is_sweep_override() and override.is_discrete_sweep()
    values = list(override.sweep_iterator()) if swept else [override.value()]
    for value in values:
        for choice in value if isinstance(value, list) and value else [value]:
            if choice is None or str(choice) not in options:
                name = "null" if choice is None else str(choice)
                raise UserError(_no_such_choice(group, name, options))
    return [f"{override.get_key_element()}={value}" for value in values] if swept else [text]


def _refuse_without(group: str, config_name: str, options: Sequence[str]) -> None:
    """Refuse to leave out a group that something is chosen of by default."""
    default = _compose(config_name, []).hydra.runtime.choices.get(group)
    if default is not None and not group.startswith("hydra/"):
        raise UserError(f"{group} cannot be left out; choose one of {', '.join(sorted(options))}.")


def _no_such_choice(group: str, choice: str, options: Sequence[str]) -> str:
    near = difflib.get_close_matches(choice, options, 3, cutoff=0.6)
    if len(options) > _FEW and near:
        return f"{group} has no choice {choice!r}{suggestion(near)}"
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{group} has no choice {choice!r}; {meant}choose one of {', '.join(sorted(options))}."


def _check_setting(override: Override, base: DictConfig, config_name: str) -> None:
    """Check that the option exists in `base` and that the value is of its type."""
    key = override.key_or_group
    if override.is_add() or override.is_force_add():
        return
    node = _default(base, key)
    if node is _ABSENT:
        raise UserError(_no_such_option(override, base, config_name))
    if override.is_delete():
        return
    value = _value(override)
    if _is_section(node) and isinstance(value, (str, int, float)):
        keys = ", ".join(f"{key}.{name!s}" for name in node)
        raise UserError(f"{override.input_line!r}: {key} is a section; set one of {keys}.")
    if not _fits(value, node, base, key):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[type(node)]
        typed = str(override.input_line).partition("=")[2] or "empty"
        raise UserError(f"{key} is {typed}, but it must be {kind}, such as its default {node}.")


def _no_such_option(override: Override, base: DictConfig, config_name: str) -> str:
    key, text = override.key_or_group, str(override.input_line)
    names = _flatten(base, skip_hydra=not key.startswith("hydra"))
    near = nearest(key, names if key.startswith("hydra") else [*names, *_known_names(config_name)])
    if key in near:
        group = key.partition(".")[0]
        return f"{text!r}: the {group} chosen has no such option; another choice of {group}= has."
    message = f"{text!r}: there is no option {key!r}"
    parent, _, leaf = key.rpartition(".")
    node = OmegaConf.select(base, parent, throw_on_missing=False) if parent else None
    foreign = _is_section(node) and not str(node.get("_target_") or OURS).startswith(OURS)
    # Ours list all that they take.
    if foreign and leaf in hints_of(node):
        return f"{message} in the configuration, but its class takes one: +{text} passes it."
    if near:
        return message + suggestion(near)
    if not _is_section(node):
        return f"{message}; --help lists the groups and options."
    inside = [str(name) for name in node if not str(name).startswith("_")]
    message += f"; {parent} has {', '.join(inside) or 'no options'}"
    if foreign:
        # Third-party classes take more options than their yaml shows.
        message += f" (+{text} passes one that is not listed)"
    return message + "."


_ABSENT = object()


def _is_section(node: object) -> TypeGuard[DictConfig]:
    return OmegaConf.is_dict(node)


def _default(config: DictConfig, key: str) -> Any:
    """The value that `key` has in the configuration; _ABSENT if the option does not exist.

    Interpolations stay as they are written, because some resolve only when the run begins.
    """
    parent, _, leaf = key.rpartition(".")
    section = OmegaConf.select(config, parent, throw_on_missing=False) if parent else config
    if not _is_section(section) or leaf not in section._content:  # type: ignore[operator]
        return _ABSENT
    node: Any = section._get_node(leaf)
    return node if _is_section(node) and node._content is not None else node._value()


def _flatten(config: DictConfig, skip_hydra: bool) -> list[str]:
    def walk(node: Any, prefix: str) -> Iterator[str]:
        for key, value in node.items_ex(resolve=False):
            if not prefix and skip_hydra and key == "hydra":
                continue
            yield f"{prefix}{key}"
            if _is_section(value) and not (value._is_none() or value._is_missing()):
                if not value._is_interpolation():
                    yield from walk(value, f"{prefix}{key}.")

    return [name for name in walk(config, "") if not name.rpartition(".")[2].startswith("_")]


def _fits(value: Any, default: Any, base: DictConfig, key: str) -> bool:
    """Whether `value` may replace the number or switch `default`.

    Lists, null and interpolations are left to the code that uses them.
    """
    # Not by `build.check_section`: it needs a class, and most sections have but their defaults.
    allowed = {bool: (bool,), int: (int,), float: (int, float)}.get(type(default))
    interpolated = isinstance(value, str) and "${" in value
    if allowed is None or interpolated or not isinstance(value, (bool, int, float, str)):
        return True
    if type(value) in allowed:
        return True
    parent, _, leaf = key.rpartition(".")
    node = OmegaConf.select(base, parent) if parent else None
    if not _is_section(node) or node.get("_target_") is None:
        return False
    return admits(node, leaf, value)
