"""Results are written whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imagegen.core.errors import UserError
from imagegen.core.files import ensure_writable, staged_folder, write_atomic

OWNED = ["grid.png", "images", "manifest.json"]


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else "<folder>"
        for path in sorted(folder.rglob("*"))
    }


def fill(folder: Path, text: str) -> None:
    (folder / "images").mkdir()
    (folder / "images" / "00000.png").write_text(text)
    (folder / "grid.png").write_text(text)


def test_new_folder_appears_whole_with_missing_parents(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out"
    with staged_folder(target, OWNED) as folder:
        fill(folder, "new")
        assert not target.exists()
    assert tree(tmp_path / "a") == {
        "b": "<folder>",
        "b/out": "<folder>",
        "b/out/grid.png": "new",
        "b/out/images": "<folder>",
        "b/out/images/00000.png": "new",
    }


def test_new_folder_has_usual_permissions(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out", OWNED):
        pass
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("error", [RuntimeError("bug"), KeyboardInterrupt(), UserError("no")])
def test_failure_leaves_neither_folder_nor_parents(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), staged_folder(tmp_path / "a" / "b" / "out", OWNED) as folder:
        fill(folder, "new")
        raise error
    assert tree(tmp_path) == {}


def test_earlier_result_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with staged_folder(target, OWNED) as folder:
        fill(folder, "old")
        (folder / "images" / "00001.png").write_text("old")
        (folder / "manifest.json").write_text("old")
    with staged_folder(target, OWNED) as folder:
        fill(folder, "new")
    assert tree(tmp_path) == {
        "out": "<folder>",
        "out/grid.png": "new",
        "out/images": "<folder>",
        "out/images/00000.png": "new",
    }


def test_failure_leaves_earlier_result(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with staged_folder(target, OWNED) as folder:
        fill(folder, "old")
    before = tree(tmp_path)
    with pytest.raises(RuntimeError), staged_folder(target, OWNED) as folder:
        fill(folder, "new")
        raise RuntimeError
    assert tree(tmp_path) == before


def test_failing_swap_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    with staged_folder(target, OWNED) as folder:
        fill(folder, "old")
    before = tree(tmp_path)
    rename = Path.rename
    broken: list[Path] = []

    def fail(self: Path, other: Path) -> Path:
        if self.name == "images" and other.parent == target and not broken:
            broken.append(self)
            raise OSError(errno.EIO, "input/output error", str(self))
        return rename(self, other)

    with pytest.raises(UserError, match="out"), staged_folder(target, OWNED) as folder:
        fill(folder, "new")
        monkeypatch.setattr(Path, "rename", fail)
    monkeypatch.undo()
    assert tree(tmp_path) == before


def test_foreign_files_are_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match=r"thesis\.tex"), staged_folder(tmp_path, OWNED):
        pytest.fail("must not start")
    assert tree(tmp_path) == {"thesis.tex": "years"}


def test_leftover_of_a_killed_process_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / ".out.x1y2.partial").mkdir()
    with staged_folder(tmp_path, OWNED) as folder:
        fill(folder, "new")
    assert (tmp_path / "grid.png").read_text() == "new"


def test_working_directory_stays_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inode = tmp_path.stat().st_ino
    with staged_folder(Path("."), OWNED) as folder:
        fill(folder, "new")
    assert os.stat(".").st_ino == tmp_path.stat().st_ino == inode
    assert Path("grid.png").read_text() == "new"


def test_symbolic_link_stays(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with staged_folder(tmp_path / "link", OWNED) as folder:
        fill(folder, "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "grid.png").read_text() == "new"


@pytest.mark.parametrize("inside", ["", "deeper", "deeper/still"])
def test_file_in_the_way(tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match="file"), staged_folder(tmp_path / "file" / inside, OWNED):
        pytest.fail("must not start")
    assert tree(tmp_path) == {"file": "kept"}


def test_unwritable_place_is_refused_before_any_work() -> None:
    with pytest.raises(UserError, match="/proc/out"), staged_folder(Path("/proc/out"), OWNED):
        pytest.fail("must not start")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_a_sentence(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(UserError, match=f"cannot write {target}: no space left on device"):
        with staged_folder(target, OWNED), open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")
    assert tree(tmp_path) == {}


def test_errors_of_other_files_keep_their_kind(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), staged_folder(tmp_path / "out", OWNED):
        (tmp_path / "missing.png").read_bytes()


def test_write_atomic(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    write_atomic(path, "héllo")
    assert path.read_bytes() == "héllo".encode()
    path.chmod(0o640)
    write_atomic(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(path.parent) == ["result.json"]


def test_write_atomic_through_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_atomic(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"


def test_write_atomic_failure_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=f"cannot write {path}: no space left on device"):
        write_atomic(path, "new")
    assert tree(tmp_path) == {"result.json": "old"}


def test_an_interrupt_at_the_worst_moment_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the temporary file or folder has just been made."""

    def interrupted(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(path: Any, *args: Any, **options: Any) -> Any:
            found = make(path, *args, **options)
            if str(path).endswith(".partial"):
                patch.undo()
                raise KeyboardInterrupt
            return found

        return made

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "open", interrupted(os.open))
        write_atomic(tmp_path / "result.json", "new")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "mkdir", interrupted(Path.mkdir))
        with staged_folder(tmp_path / "folder", []):
            pass
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_devices_are_written_directly() -> None:
    write_atomic(Path("/dev/null"), "x")
    assert not Path("/dev/null").is_file()
    with pytest.raises(UserError, match="/dev/full: no space left"):
        write_atomic(Path("/dev/full"), "x")


def test_write_atomic_onto_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a directory"):
        write_atomic(tmp_path, "x")


def test_ensure_writable(tmp_path: Path) -> None:
    ensure_writable(tmp_path / "a" / "b" / "result.json")
    assert tree(tmp_path) == {}
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file" / "x.json", tmp_path, Path("/proc/x.json")):
        with pytest.raises(UserError, match=str(path)):
            ensure_writable(path)
