"""Runs the tests in fresh environments: other Pythons, the lowest versions and the newest.

`make matrix` runs all rows, `make matrix ROWS="3.10 lowest"` some. A row `3.N` has that Python and
the pinned versions of constraints.txt; `lowest` has Python 3.10 and, of each package that
pyproject.toml names, the lowest version that it allows; `newest` has the newest versions that it
allows, on the newest Python here that all of them can be installed on. All extras are installed. A
row whose Python is not on this machine is reported as not run.

The tests are those of `make test` without SLOWEST, which `--all` adds. The linter and the type
checker belong to the pinned environment and are not run.

Environments, downloads (about 25 GB; UV_CACHE_DIR names another folder) and logs are in .matrix/;
all but the logs are removed at the end unless `--keep` is given. The figures are written to
benchmarks/results/versions/table.md, where rows that were not chosen are kept. The exit status is 1
if a row failed or none ran.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".matrix"
TABLE = ROOT / "benchmarks/results/versions/table.md"
ROWS = ("3.10", "3.12", "3.13", "lowest", "newest")
PYTHONS = ("3.15", "3.14", "3.13", "3.12", "3.11", "3.10")  # newest first
COLUMNS = (
    *("row", "Python", "torch", "Lightning", "numba", "numpy"),
    *("tests", "passed", "failed", "skipped", "seconds", "processor", "commit"),
)
# Measuring, killing, changed options and nonsense as input: what takes longest and depends least
# on versions.
SLOWEST = (
    "tests/checkpoint/test_hostile.py",
    "tests/commands/benchmark",
    "tests/core/test_memory.py",
    "tests/data/test_changed_folders.py",
    "tests/generation/test_job_folder.py",
    "tests/test_full_disk.py",
    "tests/test_fuzz.py",
    "tests/test_memory.py",
    "tests/tracking/test_sweeps.py",
    "tests/training/test_continuation.py",
    "tests/training/test_interruptions.py",
    "tests/training/test_processes.py",
    "tests/training/test_second_interrupt.py",
)
# What a row's own Python says of itself.
DESCRIBE = """
import json, platform
from importlib.metadata import version
import torch
from imagegen.core.machine import describe
machine = describe(torch.device("cpu"))
packages = [version(name) for name in ("torch", "pytorch-lightning", "numba", "numpy")]
processor = "{processor}, {cpu_capability}, {usable_cpus} CPUs".format_map(machine)
print(json.dumps([[platform.python_version(), *packages], processor]))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows in turn; 1 if one failed or none ran."""
    parser = argparse.ArgumentParser(description="Run the tests with other versions.")
    parser.add_argument("rows", nargs="*", default=ROWS, help=f"of {', '.join(ROWS)}; any 3.N")
    parser.add_argument("--all", action="store_true", help="all tests, not only the faster ones")
    parser.add_argument("--keep", action="store_true", help="leave the environments in .matrix/")
    parser.add_argument("--workers", default="2", help="processes that run tests")
    options = parser.parse_args(arguments)
    for row in options.rows:
        if row not in (*ROWS, *PYTHONS):
            parser.error(f"there is no row {row}; choose from {', '.join(ROWS)}, or name a Python")

    FOLDER.mkdir(exist_ok=True)
    os.environ.setdefault("UV_CACHE_DIR", str(FOLDER / "cache"))
    # pyenv's own `python3.N` ends with an error for each Python that it was not told to use.
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    os.environ["PATH"] = os.pathsep.join([*map(str, pyenv.glob("*/bin")), os.environ["PATH"]])
    commit = output("git", "describe", "--always", "--dirty", "--exclude=*") or "?"
    uv = find_uv()
    ran = []
    try:
        for row in options.rows:
            print(f"== {row}", flush=True)
            cells, passed = run(uv, row, options)
            ran += [] if passed is None else [passed]
            print(f"== {row}: {', '.join(cells)}", flush=True)
            write([row, *cells, *[""] * (len(COLUMNS) - 2 - len(cells)), commit])
            if not options.keep:
                shutil.rmtree(FOLDER / row, ignore_errors=True)
    finally:
        if not options.keep:
            for path in filter(Path.is_dir, FOLDER.iterdir()):
                shutil.rmtree(path, ignore_errors=True)
    print(f"\n{TABLE.read_text()}\nLogs are in {FOLDER.name}/.")
    return 0 if ran and all(ran) else 1


def output(*command: str | Path) -> str | None:
    """What a command prints; None if it failed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def find_uv() -> str:
    """The installed uv, or one that is installed here."""
    if found := shutil.which("uv"):
        return found
    log, python = FOLDER / "uv.log", FOLDER / "uv/bin/python"
    if follow(log, sys.executable, "-m", "venv", FOLDER / "uv") or (
        follow(log, python, "-m", "pip", "install", "uv")
    ):
        sys.exit(f"error: uv, which makes the environments, could not be installed; see {log}.")
    return str(FOLDER / "uv/bin/uv")


def run(uv: str, row: str, options: argparse.Namespace) -> tuple[list[str], bool | None]:
    """The cells of a row after its name, and whether its tests passed; None if it was not run."""
    wanted = {"lowest": ["3.10"], "newest": PYTHONS}.get(row, [row])
    find = (uv, "python", "find", "--system", "--no-python-downloads")
    pythons = [found for version in wanted if (found := output(*find, version))]
    if not pythons:
        return [f"not run: python{wanted[-1]} not found"], None
    log = FOLDER / f"{row}.log"
    if not any(install(uv, row, python, log) for python in pythons):
        return [f"could not be installed, see {FOLDER.name}/{log.name}"], False

    python = FOLDER / row / "bin/python"
    report = FOLDER / f"{row}.xml"
    report.unlink(missing_ok=True)
    if follow(log, python, "-c", DESCRIBE):
        return [f"could not be imported, see {FOLDER.name}/{log.name}"], False
    versions, processor = json.loads(log.read_text().splitlines()[-1])
    begin = time.monotonic()
    status = follow(
        log,
        *(python, "-m", "pytest", "-n", options.workers, "--dist", "loadfile", "-q"),
        *("-p", "no:cacheprovider", f"--junitxml={report}"),
        *(() if options.all else (f"--ignore={path}" for path in SLOWEST)),
    )
    seconds = time.monotonic() - begin
    if not report.exists():
        return [*versions, f"pytest ended with status {status}"], False
    suite = ElementTree.parse(report).find("testsuite")
    assert suite is not None
    tests, skipped, *bad = (
        int(suite.get(n, 0)) for n in ("tests", "skipped", "failures", "errors")
    )
    counts = (tests - skipped - sum(bad), sum(bad), skipped, round(seconds))
    half = "all" if options.all else "faster"
    return [*versions, half, *map(str, counts), processor], status == 0


def install(uv: str, row: str, python: str, log: Path) -> bool:
    """Make a row's environment anew; False if its packages cannot be installed."""
    choice = {"lowest": ["--resolution", "lowest-direct"], "newest": ["--upgrade"]}.get(
        row, ["--constraint", "constraints.txt"]
    )
    packages = ("--editable", ".", "--requirements", "pyproject.toml", "--all-extras")
    log.write_bytes(b"")
    return not follow(log, uv, "venv", "--quiet", "--clear", "--python", python, FOLDER / row) and (
        not follow(log, uv, "pip", "install", "--python", FOLDER / row, *packages, *choice)
    )


def follow(log: Path, *command: str | Path) -> int:
    """Exit status of a command whose output is added to a file."""
    with log.open("ab") as file:
        return subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode


def write(cells: Sequence[str]) -> None:
    """Put a row into the table, in place of the one of that name."""
    lines = TABLE.read_text().splitlines()[2:] if TABLE.exists() else []
    rows = {line.split("|")[1].strip(): line for line in lines}
    rows[cells[0]] = f"| {' | '.join(cells)} |"
    order = sorted(rows, key=lambda name: (*ROWS, *rows).index(name))
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join([*head, *(rows[name] for name in order)]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
