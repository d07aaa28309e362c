"""List runs, the best first: `imagegen runs FOLDER …`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from imagegen.core.errors import UserError
from imagegen.core.installation import PROJECT_ROOT, typed
from imagegen.tracking.runs_table import ORDERS, find_runs, print_table, sort_runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=typed("runs"),
        description="List the runs in and below some folders, the best first.",
    )
    usual = "by default outputs/ of the clone or, without one, of this folder"
    parser.add_argument("folders", nargs="*", type=Path, help=usual)
    parser.add_argument("--sort", choices=ORDERS, default="best")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    roots = options.folders or [PROJECT_ROOT / "outputs"]
    try:
        runs = sort_runs(find_runs(roots), options.sort)
        if not runs:
            raise UserError(f"there are no runs in {', '.join(map(str, roots))}.")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        rows = [{**asdict(run), "folder": str(run.folder)} for run in runs]
        print(json.dumps(rows, indent=2))
    else:
        print_table(runs, roots)
    return 0
