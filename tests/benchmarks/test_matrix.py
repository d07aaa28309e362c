"""The matrix of versions, with a uv and a Python that only pretend."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks import matrix

# Knows Python 3.10 and 3.12; nothing can be installed on the latter with new versions.
UV = """
import pathlib, shutil, sys
arguments = sys.argv[1:]
if arguments[:2] == ["python", "find"]:
    if arguments[-1] not in ("3.10", "3.12"):
        sys.exit("no such Python")
    print("python" + arguments[-1])
elif arguments[0] == "venv":
    folder = pathlib.Path(arguments[-1]) / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(pathlib.Path(__file__).with_name("python"), folder / "python")
    (folder / "made_for").write_text(arguments[-2])
else:
    folder = pathlib.Path(arguments[arguments.index("--python") + 1]) / "bin"
    if "--upgrade" in arguments and (folder / "made_for").read_text() == "python3.12":
        sys.exit("no solution found")
    print("installed", *arguments)
"""
PYTHON = """
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
if "-c" in sys.argv:
    versions = [(here / "made_for").read_text(), "2.9", "2.6", "0.61", "2.0"]
    print(json.dumps([versions, "a processor"]))
else:
    outcome = os.environ["OUTCOME"]
    if outcome == "crash":
        sys.exit(139)
    (report,) = [a.split("=", 1)[1] for a in sys.argv if a.startswith("--junitxml=")]
    counts = f'tests="10" skipped="2" failures="{outcome}" errors="1"'
    pathlib.Path(report).write_text(f"<testsuites><testsuite {counts}/></testsuites>")
    sys.exit(outcome != "0")
"""


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, source in (("uv", UV), ("python", PYTHON)):
        (commands / name).write_text(f"#!{sys.executable}\n{source}")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(commands), os.environ["PATH"]]))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OUTCOME", "0")
    monkeypatch.setattr(matrix, "FOLDER", tmp_path / ".matrix")
    monkeypatch.setattr(matrix, "TABLE", tmp_path / "versions/table.md")


def table() -> list[list[str]]:
    lines = matrix.TABLE.read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_rows_that_can_be_made_are_run_and_the_others_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert matrix.main(["3.12", "3.13", "lowest"]) == 0
    heading, _, pinned, missing, lowest = table()
    assert heading == list(matrix.COLUMNS)
    assert pinned[:2] == ["3.12", "python3.12"]
    assert missing[:2] == ["3.13", "not run: python3.13 not found"]
    assert lowest[:6] == ["lowest", "python3.10", "2.9", "2.6", "0.61", "2.0"]
    passed, failed, skipped = lowest[7:10]
    assert (passed, failed, skipped) == ("7", "1", "2")
    assert {len(row) for row in table()} == {len(matrix.COLUMNS)}
    assert "python3.13 not found" in capsys.readouterr().out


def test_a_failed_row_is_not_the_last_and_decides_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTCOME", "3")
    assert matrix.main(["3.10", "3.12"]) == 1
    assert [row[8] for row in table()[2:]] == ["4", "4"]
    monkeypatch.setenv("OUTCOME", "crash")
    assert matrix.main(["3.12"]) == 1
    assert "pytest ended with status 139" in table()[3]


def test_rows_that_were_not_chosen_stay_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matrix.main(["newest", "3.12"]) == 0
    before = table()
    monkeypatch.setenv("OUTCOME", "3")
    assert matrix.main(["3.12", "3.10"]) == 1
    assert [row[0] for row in table()[2:]] == ["3.10", "3.12", "newest"]
    assert table()[-1] == before[-1]


def test_the_newest_row_has_the_newest_python_that_packages_can_be_installed_on() -> None:
    assert matrix.main(["newest"]) == 0
    assert table()[2][1] == "python3.10"


def test_rows_ask_for_pinned_lowest_and_newest_versions() -> None:
    matrix.main(["3.10", "lowest", "newest"])
    logs = [(matrix.FOLDER / f"{row}.log").read_text() for row in ("3.10", "lowest", "newest")]
    asked = ("--constraint constraints.txt", "--resolution lowest-direct", "--upgrade")
    assert [[option in log for option in asked] for log in logs] == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
    ]
    assert all("--all-extras" in log for log in logs)


def test_environments_are_removed_unless_they_are_kept() -> None:
    matrix.main(["3.10"])
    assert [path.name for path in matrix.FOLDER.iterdir() if path.is_dir()] == []
    matrix.main(["3.10", "--keep"])
    assert (matrix.FOLDER / "3.10/bin/python").exists()


def test_without_any_python_the_status_is_1() -> None:
    assert matrix.main(["3.13"]) == 1


def test_an_unknown_row_is_refused_before_anything_is_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        matrix.main(["3.10", "lowset"])
    assert "there is no row lowset; choose from 3.10, 3.12" in capsys.readouterr().err
    assert not matrix.FOLDER.exists()
