"""What the page draws with a model: one drawing at a time.

Axes: `b` image, `h w c` height, width, channel.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jaxtyping import Bool, UInt8

from imagegen.commands.page.job import STOPPED, Job
from imagegen.core.errors import UserError
from imagegen.core.installation import typed
from imagegen.core.override_syntax import in_shell, quote
from imagegen.core.values import MAX_SEED, resolve_device, whole_number
from imagegen.generation.sample_options import controls_of, labels_of
from imagegen.tracking.runs_table import RUNS

if TYPE_CHECKING:
    import torch

    from imagegen.checkpoint.reading import LoadedCheckpoint
    from imagegen.core.spec import ImageSpec
    from imagegen.generation.particles import Report
    from imagegen.generation.watching import Snapshot
    from imagegen.heads.controls import Controls
else:  # Annotations are checked in tests; these are imported late.
    Controls = ImageSpec = LoadedCheckpoint = Report = Snapshot = Any

_OTHER = ("null", "true", "false", "nan", "inf")  # words that Hydra takes for something else

_ADVICE = "a model trained with model.order=any, such as models/mnist_any, needs none"

MOST_IMAGES = 64
MOST_COMPLETIONS = 16
MOST_VALUES = 1 << 22
"""Of all images of a drawing together."""

T = TypeVar("T")


@dataclass(frozen=True)
class Wish:
    """How to draw, as typed on the page.

    Attributes:
        number: of images, or of completions.
        label: class names; none for images without labels.
    """

    number: int
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    guidance: float = 1.0
    label: tuple[str, ...] = ()

    def controls(self) -> Controls:
        """The same as `Controls`.

        Raises:
            UserError: for numbers out of their range.
        """
        whole_number(self.seed, "seed", 0, MAX_SEED)
        given = {"mixture_temperature": None, "scale_temperature": None}
        named = {name: getattr(self, name) for name in ("temperature", "top_p", "guidance")}
        return controls_of({**given, **named})


@dataclass(frozen=True)
class Growing:
    """Images while they are drawn, and in the end.

    Attributes:
        levels: 0 where nothing is known.
        known: the pixels that are drawn or were given.
        done: the share of the images that is drawn.
        remarks: sentences to read in the end.
    """

    levels: UInt8[np.ndarray, "b h w c"]
    known: Bool[np.ndarray, "b h w"]
    done: float
    finished: bool = False
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Version:
    """A file of weights as it is at a moment."""

    path: Path
    inode: int
    changed: int


@dataclass(frozen=True)
class About:
    """What the page shows of a model without having it.

    Attributes:
        version: of the file that it was read from.
        spec: size, channels and levels of the images.
        n_classes: None where the model knows none.
        class_names: empty where it knows none.
        layers: how many blocks the model has.
        length: steps of an image.
    """

    version: Version
    spec: ImageSpec
    n_classes: int | None
    class_names: list[str]
    layers: int
    length: int


class Desk:
    """What the studios of a page share: one model in memory, and one drawing at a time.

    Attributes:
        turn: held while something is drawn.
    """

    def __init__(self) -> None:
        self.turn, self._reading = threading.Lock(), threading.Lock()
        self._read: tuple[Version, LoadedCheckpoint] | None = None

    def loaded(self, version: Version, device: torch.device) -> LoadedCheckpoint:
        """The model of a file, in place of the one before.

        Raises:
            UserError: where the file cannot be read.
        """
        from imagegen.checkpoint.reading import load_checkpoint

        with self._reading:
            if self._read is None or self._read[0] != version:
                self._read = None  # never two of them in memory
                self._read = (version, load_checkpoint(version.path, device))
            return self._read[1]


class Studio:
    """Draws for the visitors of the page, one after the other.

    Args:
        ckpt: checkpoint file or run folder; read again when the file has changed.
        device: see `imagegen.core.values.resolve_device`.
        runs: folder whose runs are shown.
        dataset: options of the model's data set to change, for its test images.
        desk: shared by the studios of a page.

    Raises:
        UserError: where there is none, or none that can be read.
    """

    def __init__(
        self,
        ckpt: str,
        device: str = "auto",
        runs: Path = RUNS,
        dataset: Mapping[str, Any] | None = None,
        desk: Desk | None = None,
    ) -> None:
        self.ckpt, self.runs, self.dataset = ckpt, runs, dataset or {}
        self.device = resolve_device(device)
        self.desk = desk or Desk()
        self._jobs: dict[str, Job[Any]] = {}
        self._about: About | None = None
        self.about()

    def version(self) -> Version:
        """Of the file as it is now.

        Raises:
            UserError: where it has vanished.
        """
        from imagegen.checkpoint.reading import resolve_checkpoint

        path = resolve_checkpoint(self.ckpt)
        status = os.stat(path)
        return Version(path, status.st_ino, status.st_mtime_ns)

    def loaded(self) -> LoadedCheckpoint:
        """The model, as its file is now, so that what is shown can be drawn again from it.

        Raises:
            UserError: where the file has vanished or cannot be read.
        """
        return self.desk.loaded(self.version(), self.device)

    def about(self) -> About:
        """The same of what is shown beside its drawings, without its weights.

        Raises:
            UserError: as `loaded`.
        """
        about, version = self._about, self.version()
        if about is None or about.version != version:
            loaded = self.desk.loaded(version, self.device)
            model, names = loaded.model, loaded.class_names
            size = (len(model.blocks), model.raster.length)
            about = self._about = About(version, model.spec, model.n_classes, names, *size)
        return about

    @property
    def spec(self) -> ImageSpec:
        """Size, channels and levels of the images."""
        return self.about().spec

    def class_names(self) -> list[str]:
        """Names of the classes that the model knows; empty where it knows none."""
        return self.about().class_names

    def labels(self, wish: Wish) -> list[int] | None:
        """The class numbers that are wished.

        Raises:
            UserError: for names that the model does not know, and for guidance towards none.
        """
        about = self.about()
        if wish.guidance != 1 and not wish.label:
            raise UserError(
                f"guidance={wish.guidance:g} needs a class to guide towards; choose one."
            )
        return labels_of(list(wish.label) or None, about.class_names, about.n_classes)

    def number_of(self, name: str | None) -> int | None:
        """The number of one class; None for none.

        Raises:
            UserError: for a name that the model does not know.
        """
        found = None if name is None else self.labels(Wish(1, label=(name,)))
        return None if found is None else found[0]

    def samples(self, visitor: str, wish: Wish) -> Iterator[Growing]:
        """New images, while they are drawn.

        Raises:
            UserError: for what cannot be drawn.
        """
        self._check_number("images", wish.number, MOST_IMAGES)

        def work(show: Callable[[Growing], None]) -> Growing:
            from imagegen.generation.sampling_loop import generate

            model = self.loaded().model
            collected = _Collected(model.spec, [(i, 0) for i in range(wish.number)], show)
            options: dict[str, Any] = {"seed": wish.seed, "labels": self.labels(wish)}
            options |= {"controls": wish.controls(), "watch": collected.see}
            drawn = list(generate(model, wish.number, progress=collected.advance, **options))
            return collected.finished(np.concatenate(drawn))

        return self.run(visitor, work)

    def get_ready(self) -> None:
        """Draw one image that nobody sees, so that the first visitor need not wait for compiling.

        Where that fails, the first visitor is told.
        """
        with suppress(Exception):
            list(self.samples("", Wish(1)))

    def completions(
        self,
        visitor: str,
        image: UInt8[np.ndarray, "h w c"],
        visible: Bool[np.ndarray, "h w"],
        wish: Wish,
    ) -> Iterator[Growing]:
        """Completions of an image (levels), while they are drawn; see `complete` for how.

        Raises:
            UserError: for what cannot be completed.
        """
        self._check_number("completions", wish.number, MOST_COMPLETIONS)
        if visible.all():
            raise UserError("nothing is hidden; erase what the model is to draw.")

        def work(show: Callable[[Growing], None]) -> Growing:
            from imagegen.generation.completion import collapse
            from imagegen.generation.sampling_loop import complete

            model = self.loaded().model
            reports: dict[int, Report] = {}
            which = [(0, fork) for fork in range(wish.number)]
            collected = _Collected(model.spec, which, show, image, visible)
            options: dict[str, Any] = {"seed": wish.seed, "labels": self.labels(wish)}
            options |= {"controls": wish.controls(), "watch": collected.see}
            options |= {"progress": collected.advance, "report": reports.__setitem__}
            drawn = complete(model, image[None], visible[None], wish.number, **options)[0]
            return collected.finished(drawn, collapse(reports, _ADVICE))

        return self.run(visitor, work)

    def run(self, visitor: str, work: Callable[[Callable[[T], None]], T]) -> Iterator[T]:
        """The frames of some work; a visitor's earlier work ends.

        Raises:
            Stopped: where the work ends before its last frame, as `stop` is called.
            whatever the work raises.
        """
        self.stop(visitor, "stopped, as another drawing was asked for in this tab of the browser")
        job = self._jobs[visitor] = Job(work, self.desk.turn)
        try:
            yield from job.frames()
        finally:
            if self._jobs.get(visitor) is job:
                del self._jobs[visitor]

    def stop(self, visitor: str, why: str = STOPPED) -> None:
        """End what is drawn for a visitor, if anything is."""
        job = self._jobs.get(visitor)
        if job is not None:
            job.stop(why)

    def close(self) -> None:
        """End what is drawn for anybody."""
        for visitor in list(self._jobs):
            self.stop(visitor)

    def _check_number(self, what: str, number: int, most: int) -> None:
        spec = self.spec
        limit = max(1, min(most, MOST_VALUES // spec.dims))
        if not 1 <= number <= limit:
            raise UserError(f"the number of {what} must be between 1 and {limit}, not {number}.")


class _Collected:
    """Puts snapshots together, of images that may come in several batches."""

    def __init__(
        self,
        spec: ImageSpec,
        which: list[tuple[int, int]],
        show: Callable[[Growing], None],
        image: UInt8[np.ndarray, "h w c"] | None = None,
        visible: Bool[np.ndarray, "h w"] | None = None,
    ) -> None:
        self.place = {each: index for index, each in enumerate(which)}
        self.levels = np.zeros((len(which), *spec.shape), dtype=np.uint8)
        self.known = np.zeros(self.levels.shape[:3], dtype=bool)
        if image is not None and visible is not None:
            self.known[:] = visible
            self.levels[:] = image * visible[..., None]
        self.show, self.done = show, 0.0
        self._lock = threading.Lock()

    def see(self, shot: Snapshot) -> None:
        rows = [self.place[each] for each in shot.which]
        with self._lock:
            self.levels[rows], self.known[rows] = shot.levels, shot.known
        self.show(self._now())

    def advance(self, done: float) -> None:
        """Of images without snapshots too, and often enough to be stopped."""
        with self._lock:
            self.done += done / len(self.place)
        self.show(self._now())

    def finished(
        self, levels: UInt8[np.ndarray, "b h w c"], remarks: list[str] | None = None
    ) -> Growing:
        return Growing(levels, np.ones_like(self.known), 1.0, True, remarks or [])

    def _now(self) -> Growing:
        with self._lock:
            return Growing(self.levels.copy(), self.known.copy(), min(1.0, self.done))


def sample_command(ckpt: str, wish: Wish) -> str:
    """What a user types to draw the same images into files."""
    words = [f"ckpt={quoted(ckpt)}", f"n={wish.number}", f"seed={wish.seed}"]
    words += [
        f"{name}={value:g}"
        for name in ("temperature", "top_p", "guidance")
        if (value := getattr(wish, name)) != 1
    ]
    if wish.label:
        words.append(f"label=[{','.join(map(quoted, wish.label))}]")
    return " ".join([typed("sample"), *map(in_shell, words)])


def quoted(value: str) -> str:
    """A value as Hydra takes it: words with other characters between quotes."""
    if re.fullmatch(r"[A-Za-z_./][\w./-]*", value) and value.lower() not in _OTHER:
        return value
    return quote(value)
