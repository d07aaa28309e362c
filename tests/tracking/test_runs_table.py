"""`imagegen runs`: the runs of a folder, and what became of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imagegen.commands.runs import main
from imagegen.tracking.runs_table import find_runs, sort_runs
from imagegen.training.run_folder import claim_run_folder
from imagegen.training.summary import say_result


def _make(
    folder: Path, state: str | None, best: float | None = None, overrides: list[str] | None = None
) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    lines = "".join(f"- {text}\n" for text in overrides or [])
    (folder / ".hydra" / "overrides.yaml").write_text(lines or "[]\n")
    rows = "step,train/bits_per_dim,val/bits_per_dim\n9,3.5,\n19,3.1,3.25\n29,2.9,3.4\n"
    (folder / "metrics.csv").write_text(rows)
    if state is not None:
        summary = {"state": state, "best_bits_per_dim": best, "steps": 7, "seconds": 61.0}
        (folder / "summary.json").write_text(json.dumps({**summary, "parameters": 1234}))
    return folder


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    _make(tmp_path / "a" / "1", "finished", 2.5, ["dataset=mnist", "hydra.run.dir=x", "seed=1"])
    _make(tmp_path / "a" / "2", "interrupted", 2.25)
    _make(tmp_path / "b", "running", None)
    _make(tmp_path / "c", "failed", None)
    _make(tmp_path / "d", None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a" / "1" / "checkpoints").mkdir()
    _make(tmp_path / "a" / "1" / "checkpoints" / "hidden", "finished", 0.0)
    return tmp_path


def test_states(outputs: Path) -> None:
    def states() -> dict[str, str]:
        return {str(run.folder.relative_to(outputs)): run.state for run in find_runs([outputs])}

    ended = {"a/1": "finished", "a/2": "interrupted", "c": "failed"}
    assert states() == {**ended, "b": "crashed", "d": "crashed"}
    with claim_run_folder(outputs / "b", resuming=True):
        assert states() == {**ended, "b": "running", "d": "crashed"}
    assert states()["b"] == "crashed"


def test_what_a_run_says(outputs: Path) -> None:
    runs = {run.folder.name: run for run in find_runs([outputs / "a", outputs / "d"])}
    assert runs["1"].overrides == ("dataset=mnist", "seed=1")
    assert (runs["1"].best, runs["1"].seconds, runs["1"].parameters) == (2.5, 61.0, 1234)
    # The metrics tell of a run that could not say anything itself.
    assert (runs["d"].best, runs["d"].steps, runs["d"].seconds) == (3.25, 30, None)


def test_orders(outputs: Path) -> None:
    runs = list(find_runs([outputs]))
    assert [run.folder.name for run in sort_runs(runs, "best")][:3] == ["2", "1", "b"]
    assert [run.folder.name for run in sort_runs(runs, "folder")] == ["1", "2", "b", "c", "d"]
    assert next(run.state for run in sort_runs(runs, "state")) == "finished"


def test_the_command(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert main([str(outputs)]) == 0
    table = capsys.readouterr().out
    line = next(line for line in table.splitlines() if "dataset=mnist" in line)
    for text in ("a/1", "seed=1", "2.5000", "01:01", "1,234", "finished"):
        assert text in line
    assert main([str(outputs / "a"), "--json", "--sort", "folder"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["state"] for run in told] == ["finished", "interrupted"]


def test_brackets_are_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    pattern = "attention.pattern=[linear,softmax]"
    run = _make(tmp_path / "k[big][" / "x]", "finished", 2.0, [pattern, "callbacks=[/b]"])
    assert main([str(tmp_path)]) == 0
    line = next(text for text in capsys.readouterr().out.splitlines() if "finished" in text)
    for text in (pattern, "k[big][/x]", "[/b]"):
        assert text in line
    summary = {"best_bits_per_dim": 2.0, "best_checkpoint": None, "steps": 1, "epochs": 1}
    say_result({**summary, "seconds": 3.0, "parameters": 5}, run)
    assert "k[big][/x]" in capsys.readouterr().out.replace("\n", "").replace(" ", "")


def test_nothing_to_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "error: there are no runs in" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 1
    assert "is not a folder" in capsys.readouterr().err


def test_damaged_files_do_not_matter(tmp_path: Path) -> None:
    run = _make(tmp_path / "run", "finished", 2.0)
    (run / "summary.json").write_text("{")
    (run / "metrics.csv").write_bytes(b"\xff\xfe")
    (run / ".hydra" / "overrides.yaml").write_text("{: ]")
    (found,) = find_runs([tmp_path])
    assert (found.state, found.best, found.steps, found.overrides) == ("crashed", None, 0, ())


def test_a_row_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    run = _make(tmp_path / "run", None)
    with (run / "metrics.csv").open("a") as file:
        file.write("39,2.8,2.")  # of 2.95
    (found,) = find_runs([tmp_path])
    assert (found.best, found.steps) == (3.25, 30)
    (run / "summary.json").write_text('{"state": "failed", "steps": "many", "seconds": []}')
    (found,) = find_runs([tmp_path])
    assert (found.state, found.steps, found.seconds) == ("failed", 30, None)


def test_what_all_have_in_common_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    for seed in (0, 1):
        _make(tmp_path / str(seed), "finished", 2.0, ["dataset=mnist", f"seed={seed}"])
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("all: dataset=mnist\n")
    assert printed.count("dataset=mnist") == 1
    assert "seed=0" in printed
