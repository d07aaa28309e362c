"""A disk that is full: what was whole stays whole, and one sentence says what could not be written.

The limit on a file's size stands in for the disk: the system refuses what is beyond it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.commands import compress, decompress, evaluate, export, sample
from imagegen.tracking.metrics_file import MetricsFile
from imagegen.tracking.metrics_rows import read_rows
from tests.helpers import SMALL, run_main, run_train, save_tiny_checkpoint, tree

resource = pytest.importorskip("resource", reason="file sizes are limited as Unix does")


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        name: (folder / name).read_bytes() for name in tree(folder) if (folder / name).is_file()
    }


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("run") / "checkpoints" / "best.ckpt")


@pytest.mark.parametrize(
    ("main", "out", "options", "size"),
    [
        (evaluate.main, "scores.json", ["limit=4"], 64),
        (export.main, "exported", [], 64),
        (export.main, "exported", [], 4096),
        (compress.main, "images.bin", ["limit=4"], 64),
        (sample.main, "drawn", ["n=4"], 64),
        (sample.main, "drawn", ["n=4"], 512),
    ],
)
def test_a_result_is_replaced_whole_or_not_at_all(
    ckpt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    main: Callable[[], Any],
    out: str,
    options: list[str],
    size: int,
) -> None:
    typed = [f"ckpt={ckpt}", f"out={tmp_path / out}", *options]
    if main is not export.main:
        typed.append("device=cpu")
    assert run_main(monkeypatch, main, "command", *typed) == 0, capsys.readouterr().err
    before = _contents(tmp_path)
    capsys.readouterr()
    with room(size):
        assert run_main(monkeypatch, main, "command", *typed) == 1
    error = capsys.readouterr().err
    assert error.count("error: cannot write ") == 1
    assert "file too large.\n" in error
    assert "Traceback" not in error
    assert _contents(tmp_path) == before


def test_images_that_do_not_fit(
    ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decompressing leaves no folder that looks finished."""
    packed, out = tmp_path / "images.bin", tmp_path / "images"
    typed = [f"ckpt={ckpt}", f"out={packed}", "limit=4", "device=cpu"]
    assert run_main(monkeypatch, compress.main, "compress", *typed) == 0
    typed = [f"ckpt={ckpt}", f"file={packed}", f"out={out}", "device=cpu"]
    with room(32):
        assert run_main(monkeypatch, decompress.main, "decompress", *typed) == 1
    assert "file too large." in capsys.readouterr().err
    assert not out.exists()
    assert run_main(monkeypatch, decompress.main, "decompress", *typed) == 0


@pytest.mark.parametrize("size", [500, 20_000])
def test_a_run_that_goes_on_keeps_its_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    size: int,
) -> None:
    run = tmp_path / "run"
    assert run_train(monkeypatch, *SMALL, f"hydra.run.dir={run}") == 0
    before = _contents(run)
    goes_on = [f"resume={run}", "trainer.max_epochs=3"]
    capsys.readouterr()
    with room(size):
        assert run_train(monkeypatch, *goes_on) == 1
    error = capsys.readouterr().err
    assert error.count("error: cannot write ") == 1, error
    assert "Traceback" not in error
    after = _contents(run)
    for name in ("best.ckpt", "last.ckpt"):
        assert after[f"checkpoints/{name}"] == before[f"checkpoints/{name}"]
        load_checkpoint(run / "checkpoints" / name)
    assert not list(run.rglob("*.partial"))
    assert run_train(monkeypatch, *goes_on) == 0


def test_a_row_of_metrics_that_does_not_fit(tmp_path: Path) -> None:
    logger = MetricsFile(tmp_path)
    for step in range(4):
        logger.log_metrics({"loss": 1.5}, step)
    with (
        room((tmp_path / "metrics.csv").stat().st_size + 2),
        pytest.raises(OSError, match="too large"),
    ):
        logger.log_metrics({"loss": 0.123456789}, 4)
    with contextlib.suppress(OSError):
        logger.finalize("failed")
    again = MetricsFile(tmp_path, resume_step=4)
    again.log_metrics({"loss": 2.5}, 4)
    again.finalize("success")
    rows = read_rows(tmp_path / "metrics.csv")
    assert [(row["step"], row["loss"]) for row in rows] == [
        *((str(step), "1.5") for step in range(4)),
        ("4", "2.5"),
    ]
