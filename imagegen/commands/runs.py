"""List runs, the best first, or draw their learning curves: `imagegen runs FOLDER …`."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from imagegen.core.errors import UserError
from imagegen.core.files import ensure_writable, write_atomic
from imagegen.core.installation import typed
from imagegen.core.words import counted
from imagegen.tracking.curves import (
    AGAINST,
    KINDS,
    check_matplotlib,
    plot_curves,
    read_curve,
)
from imagegen.tracking.runs_table import (
    ORDERS,
    RUNS,
    Run,
    find_runs,
    print_table,
    shown_folder,
    sort_runs,
)

_VALUES, _FLAGS = ("plot", "against", "sort"), ("log", "json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=typed("runs"),
        description="List the runs in and below some folders, the best first, or draw how they "
        "learn. Options may also be typed as plot=FILE.png against=images log=true.",
    )
    usual = "by default outputs/ of the clone or, without one, of this folder"
    parser.add_argument("folders", nargs="*", type=Path, help=usual)
    parser.add_argument("--sort", metavar="|".join(ORDERS), default="best")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw the learning curves of all these runs to a PNG, SVG or PDF file, instead of a "
        "table: bits/dim of training, smoothed, and of validation",
    )
    parser.add_argument(
        "--against", metavar="|".join(AGAINST), help="what to draw it against, by default steps"
    )
    parser.add_argument("--log", action="store_true", help="make that axis logarithmic")
    try:
        words = sys.argv[1:] if arguments is None else arguments
        options = parser.parse_args(list(_as_flags(words)))
        roots = options.folders or [RUNS]
        _check(options)
        runs = sort_runs(find_runs(roots), options.sort)
        if not runs:
            raise UserError(f"there are no runs in {', '.join(map(str, roots))}.")
        if options.plot is not None:
            _plot(runs, roots, options.plot, options.against or "steps", options.log)
            return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        rows = [{**asdict(run), "folder": str(run.folder)} for run in runs]
        print(json.dumps(rows, indent=2))
    else:
        print_table(runs, roots)
    return 0


def _as_flags(words: Sequence[str]) -> Iterator[str]:
    """The arguments with each option=value, as it is typed for other commands, as --option."""
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or word.startswith("-") or not name.isidentifier() or Path(word).exists():
            yield word
        elif name in _VALUES:
            yield f"--{name}={value}"
        elif name in _FLAGS:
            if value not in ("true", "false"):
                raise UserError(f"{word}, but it must be true or false.")
            if value == "true":
                yield f"--{name}"
        else:
            near = difflib.get_close_matches(name, _VALUES + _FLAGS, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            known = ", ".join(_VALUES + _FLAGS)
            raise UserError(f"there is no option {name}; {meant}it can be {known}.")


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot be before any run is read."""
    for name, known in (("sort", ORDERS), ("against", AGAINST)):
        given = getattr(options, name)
        if given is not None and given not in known:
            raise UserError(f"{name}={given} is unknown; it can be {', '.join(known)}.")
    if options.plot is None:
        for name in ("against", "log"):
            if getattr(options, name):
                raise UserError(f"{name} needs plot=FILE.png; add it.")
        return
    if options.json:
        raise UserError("plot and json do not go together; leave one out.")
    if options.plot.suffix.lower().lstrip(".") not in KINDS:
        kinds = ", ".join(f".{kind}" for kind in KINDS)
        name = options.plot.name and options.plot
        raise UserError(f"plot={name}, but its name must end in one of {kinds}.")
    check_matplotlib()
    ensure_writable(options.plot)


def _plot(runs: Sequence[Run], roots: Sequence[Path], path: Path, against: str, log: bool) -> None:
    """Draw the curves of those runs that have one; name the others."""
    drawn, missing = {}, []
    for run in runs:
        curve, name = read_curve(run), shown_folder(run.folder, roots)
        if curve.known(against):
            drawn[name] = curve
        else:
            missing.append(name)
    lacking = f"there is no bits/dim against {against} in {', '.join(missing)}"
    if not drawn:
        raise UserError(f"{lacking}.")
    write_atomic(path, plot_curves(drawn, against, log, path.suffix[1:].lower()))
    if missing:
        print(lacking, file=sys.stderr)
    print(f"learning curves of {counted(len(drawn), 'run')}: {path}")
