"""The folder of a sampling job, which fills up image by image, so that a job can be continued.

`manifest.json` is there from the beginning and says what the job is and whether it is finished;
`images/` holds whole files only; `grid.png` comes at the end. Several processes may share the work.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from imagegen.core.errors import UserError
from imagegen.core.files import (
    lock_folder,
    made_folder,
    remove_leftovers,
    staged_folder,
    write_atomic,
)
from imagegen.core.installation import typed
from imagegen.generation.images import encode_png, save_png

MANIFEST = "manifest.json"
OWNED = ("grid.png", "images", MANIFEST)
UNFINISHED, FINISHED = "unfinished", "finished"

_IMAGE_NAME = re.compile(r"\d{5,}(-[a-z0-9]+)?\.png")
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"

# What may differ between the processes of a job: no image depends on it.
_FREE = ("checkpoint", "batch_size", "n", "images", "machine")


@dataclass
class JobFolder:
    """Where a job writes.

    Attributes:
        path: the folder; while an earlier result is being replaced, a place beside it.
        settings: what the images depend on, and `n`; the beginning of the manifest.
        state: of the manifest that was found there: unfinished, finished, or None without one.
        lock: that is held on the folder, if any.
    """

    path: Path
    settings: Mapping[str, Any]
    state: str | None = None
    lock: int | None = None
    began: bool = field(default=False, init=False)

    def begin(self) -> None:
        """Make the folder one of an unfinished job, if it is not yet."""
        if self.state != UNFINISHED:
            self.began = self.state is None
            self._write_manifest({**self.settings, "state": UNFINISHED})
            self.state = UNFINISHED
        (self.path / "images").mkdir(exist_ok=True)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of the images that are not there, or not whole."""
        there = self._listed()
        return [
            name
            for name in names
            if name not in there or not _is_whole(self.path / "images" / name)
        ]

    def lacks(self, names: Iterable[str]) -> int:
        """How many of the images are not there."""
        there = self._listed()
        return sum(name not in there for name in names)

    def write_image(self, name: str, image: UInt8[np.ndarray, "h w c"]) -> None:
        """Add an image (0..255)."""
        # Not forced to the disk one by one; `missing` would find what a power cut leaves broken.
        write_atomic(self.path / "images" / name, encode_png(image), sync=False)

    def finish(self, grid: UInt8[np.ndarray, "h w c"], result: Mapping[str, Any]) -> None:
        """Add the grid and the whole manifest, and remove what killed processes have left."""
        save_png(self.path / "grid.png", grid)
        self._write_manifest({**self.settings, **result, "state": FINISHED})
        self.state = FINISHED
        if self.lock is None or _is_alone(self.lock):
            remove_leftovers(self.path, self.path / "images")

    def take_back(self) -> None:
        """Remove what `begin` has made if nothing was drawn; else say how to continue."""
        drawn = len([name for name in self._listed() if _IMAGE_NAME.fullmatch(name)])
        if drawn and self.state == UNFINISHED:
            print(
                f"\n{self.path} keeps the {drawn} images that are there; to continue, add "
                "resume=true to the same command",
                file=sys.stderr,
            )
        elif self.began and not drawn:
            with contextlib.suppress(OSError):
                (self.path / "images").rmdir()
            (self.path / MANIFEST).unlink(missing_ok=True)

    def _listed(self) -> set[str]:
        try:
            return set(os.listdir(self.path / "images"))
        except FileNotFoundError:
            return set()

    def _write_manifest(self, content: Mapping[str, Any]) -> None:
        write_atomic(self.path / MANIFEST, json.dumps(dict(content), indent=2) + "\n")


@contextlib.contextmanager
def job_folder(
    out: Path, settings: Mapping[str, Any], resume: bool, shared: bool
) -> Iterator[JobFolder]:
    """The folder `out` for a job, for as long as the block runs.

    A new or empty folder is filled in place; if the block raises, the images drawn by then stay. An
    earlier result, being finished, is replaced at the end of the block, or left as it was.

    Args:
        out: as `check_out` accepts it.
        settings: what the images depend on.
        resume: whether an earlier job there, with the same settings, is continued.
        shared: whether other processes do other parts of the same job; implies `resume`.

    Raises:
        UserError: where the folder cannot be written, or holds an unfinished job that is not to be
        continued, or a job of other settings that is, or is in use.
    """
    settings = json.loads(json.dumps(dict(settings)))
    with made_folder(out) as path:
        try:
            lock = lock_folder(path, shared)
        except BlockingIOError as error:
            raise UserError(
                f"another {typed('sample')} is writing to {out}; wait for it to end, or choose "
                "another out."
            ) from error
        try:
            earlier = read_manifest(path)
            state = None if earlier is None else str(earlier.get("state", FINISHED))
            if earlier is None or resume or shared:
                if earlier is not None:
                    _refuse_another_job(out, earlier, settings, state == FINISHED)
                folder = JobFolder(path, settings, state, lock)
                try:
                    yield folder
                except BaseException:
                    folder.take_back()
                    raise
            elif state == FINISHED:
                with staged_folder(out, OWNED) as staging:
                    yield JobFolder(staging, settings)
            else:
                raise UserError(
                    f"out={out} holds a job that is not finished; add resume=true to continue "
                    "it, or delete the folder."
                )
        finally:
            if lock is not None:
                os.close(lock)


def check_out(out: Path) -> None:
    """Refuse a folder whose content is not a result of `sample.py`: it would be replaced.

    Raises:
        UserError: for that, and for a path that is not a folder.
    """
    try:
        names = {path.name for path in out.iterdir()} if out.exists() else set()
        # What a killed process left.
        names = {name for name in names if not name.endswith(".partial")}
        images = [path.name for path in (out / "images").glob("*")] if names else []
    except OSError as error:
        raise UserError(f"out={out} is not a folder that can be used: {error.strerror}.") from error
    if names and not (
        names <= set(OWNED)
        and read_manifest(out) is not None
        and all(_IMAGE_NAME.fullmatch(name) or name.endswith(".partial") for name in images)
    ):
        raise UserError(
            f"out={out} holds files that {typed('sample')} did not write; name a new or an empty "
            "folder."
        )


def read_manifest(out: Path) -> dict[str, Any] | None:
    """The manifest of a folder that `sample.py` wrote; None if it has none."""
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(manifest, dict) and "checkpoint_sha256" in manifest
    return manifest if ours else None


def _refuse_another_job(
    out: Path, earlier: Mapping[str, Any], settings: Mapping[str, Any], finished: bool
) -> None:
    """Only the same job can be continued; a finished one by more images as well."""
    if earlier.get("checkpoint_sha256") != settings["checkpoint_sha256"]:
        raise UserError(
            f"out={out} holds a job from another checkpoint, or from {settings['checkpoint']} "
            "before it was trained further; give that checkpoint to continue it, or another out."
        )
    for key, value in settings.items():
        if key not in _FREE and earlier.get(key) != value:
            raise UserError(
                f"out={out} holds a job with {key}={json.dumps(earlier.get(key))}, not "
                f"{json.dumps(value)}; give the same options to continue it, or another out."
            )
    before, now = earlier.get("n"), settings["n"]
    if before != now and not (finished and isinstance(before, int) and before < now):
        raise UserError(
            f"out={out} holds a job with n={before}, not {now}; give the same n to continue it "
            "(a finished job also takes a larger one), or another out."
        )
    entries, known = settings.get("images", []), earlier.get("images", [])
    for index, (old, new) in enumerate(zip(known, entries, strict=False)):
        if old != new:
            raise UserError(
                f"out={out} holds a job whose image {index} is {_source(old)}, not "
                f"{_source(new)}; give the same images and visible parts, or another out."
            )


def _source(entry: Mapping[str, Any]) -> str:
    """An image and its visible part, in words."""
    if "visible_rows" in entry:
        return f"{entry.get('source')} with {entry['visible_rows']} rows"
    which = str(entry.get("region_sha256"))[:8]
    part = entry.get("visible", entry.get("mask"))
    return f"{entry.get('source')} with {part} (region {which})"


def _is_whole(path: Path) -> bool:
    """Whether the file ends as a PNG file ends."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(-len(_PNG_END), os.SEEK_END)
        return file.read() == _PNG_END
    return False


def _is_alone(lock: int) -> bool:
    """Whether no other process holds the folder; takes it for this one alone."""
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
