"""`make gpu`: every check is tried in the time that there is, and a table has the results."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Check
from imagegen.cli.entry import PROJECT_ROOT


def _python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def _table(out: Path) -> dict[str, list[str]]:
    lines = (out / "gpu.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[4:]]
    return {name: others for name, *others in cells}


def _refuse(output: str) -> str:
    raise ValueError("no images")


def test_what_fails_does_not_stop_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = [
        Check("good", 20, [_python("print('7 images/s')")]),
        Check("bad", 20, [_python("print('why'); raise SystemExit(3)"), _python("print('never')")]),
        Check("missing", 20, [["/no/such/program"]]),
        Check("odd", 20, [_python("print()")], _refuse),
        Check("left out", 20, [_python("raise SystemExit(1)")], skipped="needs two GPUs"),
        Check("told", 20, [_python("import os; print(os.environ['A'])")], environment={"A": "b"}),
        Check("two", 20, [_python("print(1)"), _python("print('2 | 3')")]),
    ]
    assert not gpu.run(listed, tmp_path, "Checks")
    assert (tmp_path / "gpu.md").read_text().startswith("# Checks\n\n| check | result | seconds |")
    found = _table(tmp_path)
    assert list(found) == [check.name for check in listed]
    assert {name: (row[0], row[2]) for name, row in found.items()} == {
        "good": ("passed", "7 images/s"),
        "bad": ("failed", "status 3; why"),
        "missing": (
            "failed",
            "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/program'",
        ),
        "odd": ("failed", "ValueError: no images"),
        "left out": ("skipped", "needs two GPUs"),
        "told": ("passed", "b"),
        "two": ("passed", "2 \\| 3"),
    }
    assert "never" not in (tmp_path / "bad.log").read_text()
    assert "== two\n   passed 2 | 3" in capsys.readouterr().out
    assert gpu.run([listed[0], listed[4]], tmp_path, "Checks")


def test_what_takes_too_long_is_ended_with_its_processes(tmp_path: Path) -> None:
    """The child of the first check would write its file after two seconds."""
    late = tmp_path / "late"
    child = f"import time; time.sleep(2); open({str(late)!r}, 'w')"
    parent = f"import subprocess, time; subprocess.Popen({_python(child)!r}); time.sleep(60)"
    listed = [Check("endless", 1, [_python(parent)]), Check("next", 1, [_python("print('ok')")])]
    started = time.monotonic()
    assert not gpu.run(listed, tmp_path, "Checks", seconds=2)
    assert time.monotonic() - started < 10
    found = _table(tmp_path)
    assert found["endless"][0] == "failed"
    assert found["endless"][2].startswith("ended after 1 s; $ ")
    time.sleep(2.5)
    assert not late.exists()


def test_what_there_is_no_time_for_is_not_run(tmp_path: Path) -> None:
    listed = [Check(name, 60, [_python("print(1)")]) for name in ("first", "second")]
    assert not gpu.run(listed, tmp_path, "Checks", seconds=0.5)
    assert [row[0] for row in _table(tmp_path).values()] == ["not run", "not run"]


def test_an_interrupted_run_leaves_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(output: str) -> str:
        raise KeyboardInterrupt

    listed = [
        Check("first", 20, [_python("print(1)")]),
        Check("second", 20, [_python("print(1)")], interrupt),
    ]
    with pytest.raises(KeyboardInterrupt):
        gpu.run(listed, tmp_path, "Checks")
    assert [row[0] for row in _table(tmp_path).values()] == ["passed", "not run"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_limits_leave_twelve_minutes(device: str, tmp_path: Path) -> None:
    listed = gpu.checks(device, tmp_path, 2)
    assert sum(check.limit for check in listed) <= gpu.SECONDS == 720
    names = {check.name for check in listed}
    assert len(names) == len(listed)
    assert names >= {f"complete-{way}" for way in ("particles", "any-order")}
    assert names >= {"train-any-order", "evaluate-regions"}
    skipped = {check.name for check in listed if check.skipped}
    assert skipped == (set() if device == "cuda" else {"train-tf32", "train-speed-tf32"})
    (second,) = [
        check.skipped for check in gpu.checks(device, tmp_path, 1) if "second" in check.name
    ]
    assert second == "this machine has no second GPU"


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run for minutes")
def test_without_a_gpu_it_says_so_and_stops(tmp_path: Path) -> None:
    done = _run_script(tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr == "there is no CUDA GPU here: nothing was checked\n"
    assert not (tmp_path / "out").exists()


def test_an_earlier_result_is_kept(tmp_path: Path) -> None:
    done = _run_script(tmp_path, "--device", "cpu")
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path} exists; name a new folder.\n"


@pytest.mark.slow
def test_the_whole_list_on_the_cpu(tmp_path: Path) -> None:
    done = _run_script(tmp_path / "out", "--device", "cpu")
    table = (tmp_path / "out/gpu.md").read_text()
    assert done.returncode == 0, table
    found = _table(tmp_path / "out")
    results = {name: row[0] for name, row in found.items()}
    assert {name for name, result in results.items() if result == "skipped"} == {
        "train-tf32",
        "second-gpu",
        "train-speed-tf32",
    }
    assert found["mechanisms"][2].endswith("0 failed")
    assert found["evaluate-regions"][2].count("bits per hidden value (visible=left:0.5") == 2
    assert "images/s" in found["generate-mnist"][2]


def _run_script(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--out", str(out), *options],
        cwd=PROJECT_ROOT,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
        capture_output=True,
        text=True,
    )
