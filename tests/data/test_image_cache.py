"""The converted images of a folder are its images as they are now, whole, or not there at all."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagegen.cli.entry import PROJECT_ROOT
from imagegen.core.errors import UserError
from imagegen.data import image_cache
from imagegen.data.base import SPLIT_NAMES, image_digests
from imagegen.data.image_cache import build_cache, open_cache
from imagegen.data.image_folder import ImageFolder
from tests.helpers import write_image


def write_photos(root: Path, count: int = 12) -> list[np.ndarray]:
    return [write_image(root / f"{i:02}.png", (4, 4, 3), seed=i) for i in range(count)]


def opened(root: Path) -> ImageFolder:
    """The folder as a new process would open it."""
    dataset = ImageFolder(root, size=4, cache=root.parent / "cache", split_by="contents")
    dataset.prepare()
    return dataset


def holds(dataset: ImageFolder, images: list[np.ndarray]) -> bool:
    """Whether the splits hold these images and no others."""
    found = [image.tobytes() for name in SPLIT_NAMES for image in dataset.split(name).images]
    return sorted(found) == sorted(image.tobytes() for image in images)


def caches(root: Path) -> list[str]:
    return [path.name for path in (root.parent / "cache").glob("*")]


def _added(root: Path, images: list[np.ndarray]) -> None:
    images.append(write_image(root / "nested" / "new.png", (4, 4, 3), seed=99))


def _removed(root: Path, images: list[np.ndarray]) -> None:
    (root / "03.png").unlink()
    del images[3]


def _altered(root: Path, images: list[np.ndarray]) -> None:
    path = root / "05.png"
    size = path.stat().st_size
    images[5] = write_image(path, (4, 4, 3), seed=77)
    assert path.stat().st_size == size
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def _replaced_by_an_older(root: Path, images: list[np.ndarray]) -> None:
    images[5] = write_image(root / "05.png", (4, 4, 3), seed=77)
    os.utime(root / "05.png", ns=(1, 1))


def _touched(root: Path, images: list[np.ndarray]) -> None:
    os.utime(root / "05.png", ns=(1, 1))


def _exchanged(root: Path, images: list[np.ndarray]) -> None:
    for old, new in (("05.png", "x"), ("06.png", "05.png"), ("x", "06.png")):
        (root / old).rename(root / new)


@pytest.mark.parametrize(
    "change", [_added, _removed, _altered, _replaced_by_an_older, _touched, _exchanged]
)
def test_a_folder_changed_under_its_cache(
    tmp_path: Path, change: Callable[[Path, list[np.ndarray]], None]
) -> None:
    root = tmp_path / "photos"
    images = write_photos(root)
    running = opened(root)
    assert holds(running, images)
    before = list(images)
    change(root, images)
    assert holds(opened(root), images)
    assert len(caches(root)) == 1
    # A run that goes on meanwhile keeps what it has begun with.
    running.prepare()
    assert holds(running, before)
    assert len(caches(root)) == 1


@pytest.mark.parametrize("split_by", ["contents", "position"])
def test_a_file_that_goes_while_it_is_waited_for(tmp_path: Path, split_by: str) -> None:
    root = tmp_path / "photos"
    images = write_photos(root)
    dataset = ImageFolder(root, size=4, cache=tmp_path / "cache", split_by=split_by)
    assert len(dataset._listing.files) == 12
    _removed(root, images)
    with pytest.raises(UserError, match=r"03\.png (does not exist|cannot be read: No such file)"):
        dataset.prepare()
    assert caches(root) == []
    assert holds(opened(root), images)


@pytest.mark.parametrize("split_by", ["contents", "position"])
def test_a_file_that_changes_while_it_is_waited_for(tmp_path: Path, split_by: str) -> None:
    root = tmp_path / "photos"
    images = write_photos(root)
    dataset = ImageFolder(root, size=4, cache=tmp_path / "cache", split_by=split_by)
    assert len(dataset._listing.files) == 12
    _altered(root, images)
    # Else a cache of the new pixels would bear the name of the old ones.
    with pytest.raises(UserError, match=r"05\.png has been changed while"):
        dataset.prepare()
    assert caches(root) == []
    assert holds(opened(root), images)


def test_pipes_and_folders_named_like_images_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    images = write_photos(root)
    (root / "folder.png").mkdir()
    os.mkfifo(root / "pipe.png")
    assert holds(opened(root), images)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    cut=st.integers(0, 200),
    place=st.integers(0, 127),
    junk=st.one_of(
        st.binary(min_size=1, max_size=8), st.sampled_from([b"PK\x03\x04", b"\x80\x04"])
    ),
)
def test_what_is_no_whole_cache_is_none(tmp_path: Path, cut: int, place: int, junk: bytes) -> None:
    path = tmp_path / "cache.npy"
    shape = (3, 2, 4, 1)
    array = np.arange(24, dtype=np.uint8).reshape(shape)
    files = [Path(str(number)) for number in range(3)]
    contents = np.arange(3, dtype=np.uint64)
    build_cache(path, files, shape[1:], lambda file: array[int(file.name)], contents)
    assert np.array_equal(np.load(path), array)
    kept = open_cache(path, shape)
    assert kept is not None
    assert np.array_equal(kept.images, array)
    assert np.array_equal(kept.digests, image_digests(array))
    assert np.array_equal(kept.contents, contents)
    whole = path.read_bytes()
    for content in (whole[:cut], junk + whole, whole[:place] + junk + whole[place + len(junk) :]):
        path.write_bytes(content)
        found = open_cache(path, shape)
        assert found is None or (found.images.shape == shape and found.images.dtype == np.uint8)
        if len(content) < len(whole):
            assert found is None


def _fails(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    root = tmp_path / "photos"
    images = write_photos(root)
    make = image_cache.tempfile.NamedTemporaryFile
    monkeypatch.setattr(image_cache, "BLOCK", 4)
    monkeypatch.setattr(image_cache, "PART", 4)

    def filling(**options: Any) -> Any:
        file = make(**options)
        write, left = file.write, [after]

        def full(content: Any) -> int:
            left[0] -= 1
            return write(content) if left[0] >= 0 else _fails(errno.ENOSPC)()

        file.write = full
        return file

    with monkeypatch.context() as patch:
        patch.setattr(image_cache.tempfile, "NamedTemporaryFile", filling)
        with pytest.raises(UserError, match=r"No space left.*dataset\.cache to"):
            opened(root)
    assert caches(root) == []
    assert holds(opened(root), images)


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_a_disk_that_fails_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    root = tmp_path / "photos"
    images = write_photos(root)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, _fails(errno.EIO))
        with pytest.raises(UserError, match="cannot be written"):
            opened(root)
    assert caches(root) == []
    assert holds(opened(root), images)


def read_only(patch: pytest.MonkeyPatch) -> None:
    """Nothing can be made anywhere; a superuser would be let through by permissions."""
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            _fails(errno.EROFS)()
        return real(path, flags, *args, **options)

    patch.setattr(os, "open", refusing)
    for name in ("mkdir", "replace", "unlink", "symlink"):
        patch.setattr(os, name, _fails(errno.EROFS))


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "photos"
    images = write_photos(root)
    with monkeypatch.context() as patch:
        read_only(patch)
        with pytest.raises(UserError, match=r"Read-only file system.*dataset\.cache"):
            opened(root)
    opened(root)
    with monkeypatch.context() as patch:
        read_only(patch)
        assert holds(opened(root), images)


_PREPARE = """
import sys
from pathlib import Path
from imagegen.data import image_folder
if len(sys.argv) > 2:
    read, marker = image_folder.read_image, Path(sys.argv[2])
    def slowly(*arguments):
        marker.touch()
        import time; time.sleep(0.2)
        return read(*arguments)
    image_folder.read_image = slowly
cache = Path(sys.argv[1]).parent / "cache"
dataset = image_folder.ImageFolder(sys.argv[1], size=4, cache=cache, split_by="contents")
dataset.prepare()
print(sum(int(dataset.split(name).images.sum()) for name in ("train", "val", "test")))
"""


def _start(*argv: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _PREPARE, *map(str, argv)],
        cwd=PROJECT_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_that_prepare_at_once_and_one_that_is_killed(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    images = write_photos(root)
    killed = _start(root, tmp_path / "marker")
    while not (tmp_path / "marker").exists():
        assert killed.poll() is None
        time.sleep(0.02)
    both = [_start(root) for _ in range(2)]
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    expected = f"{sum(int(image.sum()) for image in images)}\n"
    for process in both:
        out, err = process.communicate()
        assert (process.returncode, out) == (0, expected), err
    assert len([name for name in caches(root) if not name.startswith(".")]) == 1
    assert holds(opened(root), images)
