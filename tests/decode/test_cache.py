from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from imagegen.cli import PROJECT_ROOT
from imagegen.decode import cache
from imagegen.decode.cache import cache_folder, first_use, numba_cache


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "decode"
    folder.mkdir()
    (folder / "a.py").write_text("one = 1")
    (folder / "b.py").write_text("two = 2")
    monkeypatch.setattr(cache, "_SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return folder


def test_other_sources_have_another_folder(sources: Path) -> None:
    first = cache_folder()
    assert first.parent == sources / "__pycache__"
    assert cache_folder() == first
    assert first_use(first, "LinearMix")
    assert not first_use(first, "LinearMix")
    assert first_use(first, "SoftmaxMix")
    (sources / "b.py").write_text("two = 3")
    second = cache_folder()
    assert second != first
    # Code that no source belongs to any more is removed.
    assert not first.exists()


def test_a_folder_that_cannot_be_written_is_passed_over(sources: Path, tmp_path: Path) -> None:
    (sources / "__pycache__").write_text("a file where a folder should be")
    assert cache_folder().parent == tmp_path / "home" / "imagegen"
    (tmp_path / "home" / "imagegen").rename(tmp_path / "elsewhere")
    (tmp_path / "home" / "imagegen").touch()
    assert cache_folder().is_dir()


def test_numba_is_told_and_left_as_it_was(tmp_path: Path) -> None:
    from numba import config

    before = config.CACHE_DIR
    with numba_cache(tmp_path):
        assert str(tmp_path) == config.CACHE_DIR
    assert before == config.CACHE_DIR


def test_numba_is_imported_for_drawing_only(tmp_path: Path) -> None:
    script = "import sys, imagegen.generation; sys.exit('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT_ROOT, env=os.environ)
    assert done.returncode == 0


def test_without_numba_pytorch_draws(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["numba"] = None
import numpy as np
from imagegen import decode
from imagegen.generation import generate
from imagegen.spec import ImageSpec
from tests.helpers import tiny_model
decode.SHORTEST = 1
images = [next(generate(tiny_model(ImageSpec(4, 4, 1, 17)), 2, seed=seed)) for seed in (0, 0)]
assert np.array_equal(*images)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=PROJECT_ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("drawing without compiled loops") == 1
