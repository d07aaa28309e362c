from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from imagegen.cli.entry import PROJECT_ROOT
from imagegen.core.compiled import cache, compile
from imagegen.core.compiled.cache import cache_folder, first_use, numba_cache
from imagegen.core.compiled.compile import target
from imagegen.core.installation import PACKAGE
from tests.forks import Forks


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "core" / "compiled"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("one = 1")
    (folder / "b.py").write_text("two = 2")
    for name in (name for name in cache._SOURCES if "*" not in name):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(cache, "PACKAGE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return folder


def _fill(folder: Path) -> Path:
    """A folder of other sources, unused for a month."""
    (folder / "processor").mkdir(parents=True)
    (folder / "processor" / "code.nbc").touch()
    long_ago = time.time() - 30 * 24 * 3600
    os.utime(folder, (long_ago, long_ago))
    return folder


def test_other_sources_have_another_folder(sources: Path) -> None:
    first = cache_folder()
    assert first.parent.parent == sources / "__pycache__"
    assert cache_folder() == first
    assert first_use(first, "LinearMix")
    assert not first_use(first, "LinearMix")
    assert first_use(first, "SoftmaxMix")
    old = _fill(first.parent.parent / "compiled-of-long-ago")
    (sources / "b.py").write_text("two = 3")
    second = cache_folder()
    assert second != first
    # Another installation may use the first; the other has been of no use for long.
    assert first.exists()
    assert not old.exists()


def test_constants_from_elsewhere_are_sources(sources: Path) -> None:
    first = cache_folder()
    (sources.parents[1] / "heads" / "mixture_of_logistics.py").write_text("MAX_MEAN = 99")
    assert cache_folder() != first


def test_whatever_is_compiled_is_a_source() -> None:
    """Every module with a compiled function, and those that it imports a constant from."""
    known = {path for pattern in cache._SOURCES for path in PACKAGE.glob(pattern)}
    needed = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if "@compiled()" in text or "@fast()" in text:
            constants = r"^from imagegen\.([\w.]+) import .*\b[A-Z][A-Z0-9_]{2,}"
            found = re.findall(constants, text, re.MULTILINE)
            needed |= {path, *(PACKAGE / (name.replace(".", "/") + ".py") for name in found)}
    # NO_LABEL is not in a loop.
    needed -= {PACKAGE / "model" / "transformer.py"}
    assert len(needed) > 12
    assert needed <= known


def test_processors_have_folders_of_their_own(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that share a home folder neither read nor remove what others compiled."""
    first = cache_folder()
    assert first_use(first, "LinearMix")
    other = target()._replace(features={**target().features, "avx2": False, "neon": True})
    monkeypatch.setattr(compile, "target", lambda: other)
    second = cache_folder()
    assert second != first
    assert second.parent == first.parent
    assert first_use(second, "LinearMix")
    monkeypatch.undo()


def test_an_overridden_processor_has_a_folder_of_its_own() -> None:
    script = "from imagegen.core.compiled import folder; print(folder(), end='')"
    found = Path(_python(script, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=""))
    assert found != cache_folder()
    assert found.parent == cache_folder().parent


def _python(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=PROJECT_ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def read_only(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither beside the sources nor at home may be written; the temporary folder."""
    (sources / "__pycache__").write_text("a file where a folder should be")
    (tmp_path / "home").touch()
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_folder_that_cannot_be_written_is_passed_over(sources: Path, tmp_path: Path) -> None:
    (sources / "__pycache__").write_text("a file where a folder should be")
    assert cache_folder().parent.parent == tmp_path / "home" / "imagegen"


def test_later_processes_find_the_temporary_folder(read_only: Path) -> None:
    first = cache_folder()
    assert first.is_relative_to(read_only)
    assert cache_folder() == first
    (own,) = read_only.iterdir()
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    old = _fill(own / "compiled-of-long-ago")
    assert cache_folder() == first
    assert not old.exists()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="each user has a temporary folder")
@pytest.mark.parametrize("fault", ["a link", "open to others", "of another user", "a file"])
def test_a_temporary_folder_of_others_is_not_used(
    read_only: Path, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code would be executed."""
    theirs = read_only / f"imagegen-{os.getuid()}"
    if fault == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        theirs.symlink_to(tmp_path / "elsewhere")
    elif fault == "a file":
        theirs.touch()
    else:
        theirs.mkdir(mode=0o700)
    if fault == "open to others":
        theirs.chmod(0o770)
    if fault == "of another user":
        uid = os.getuid()
        theirs = theirs.rename(read_only / f"imagegen-{uid + 1}")
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    cache._of_this_process.cache_clear()
    found = cache_folder()
    cache._of_this_process.cache_clear()
    assert found.is_dir()
    assert not found.is_relative_to(theirs)
    assert not found.is_relative_to(tmp_path / "elsewhere")


def test_a_folder_of_one_process_is_removed_with_it() -> None:
    script = """
from imagegen.core.compiled import cache
cache._parents = lambda: ()
assert cache.cache_folder() == cache.cache_folder()
assert cache.cache_folder().is_dir()
print(cache.cache_folder(), end="")
"""
    assert not Path(_python(script)).exists()


@pytest.mark.skipif(sys.platform == "win32", reason="has no list of users")
def test_a_user_that_nobody_knows(read_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers run as any number: no HOME, no entry in the list of users."""
    import pwd

    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # raises KeyError
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(RuntimeError):
        Path.home()
    assert cache_folder().is_relative_to(read_only)


def test_numba_is_told_and_left_as_it_was(tmp_path: Path) -> None:
    from numba import config

    before = config.CACHE_DIR
    with numba_cache(tmp_path):
        assert str(tmp_path) == config.CACHE_DIR
    assert before == config.CACHE_DIR


def test_numba_is_imported_for_drawing_only(tmp_path: Path) -> None:
    script = "import sys, imagegen.generation.sampling_loop; sys.exit('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT_ROOT, env=os.environ)
    assert done.returncode == 0


def test_without_numba_pytorch_draws(forks: Forks) -> None:
    script = """
import sys
sys.modules["numba"] = None
import numpy as np
from imagegen.generation import decode
from imagegen.generation.sampling_loop import generate
from imagegen.core.spec import ImageSpec
from tests.helpers import tiny_model
decode.SHORTEST = 1
images = [next(generate(tiny_model(ImageSpec(4, 4, 1, 17)), 2, seed=seed)) for seed in (0, 0)]
assert np.array_equal(*images)
"""
    done = forks.run(script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("drawing without compiled loops") == 1
