"""Images while they are drawn, for those who watch.

Axes: `b` batch, `n` position, `m` position from the first one drawn on, `s` values per step,
`h w c` height, width, channel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from imagegen.model.embeddings import Raster

PICTURES = 20
"""Snapshots a second, at most."""
SHARE = 1 / 12
"""Of the time, that snapshots may take; where one takes long, there are fewer."""

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Snapshot:
    """Images that are being drawn, as they are at a moment; arrays of their own.

    Attributes:
        which: image and completion (0 for samples) of each.
        levels: what is drawn or was given, 0 elsewhere.
        known: which pixels these are; those whose channels are drawn one by one need all of them.
    """

    which: tuple[tuple[int, int], ...]
    levels: UInt8[np.ndarray, "b h w c"]
    known: Bool[np.ndarray, "b h w"]


Watch = Callable[[Snapshot], None]


class Growth:
    """Follows some sequences while they are drawn, and reports them.

    Called with rows and the step before which all of their values are drawn, from any thread. What
    `progress` or `watch` raises comes through, which ends the drawing.

    Args:
        progress: called with the (fractional) number of sequences drawn since the last call.
        watch: called with snapshots, by one thread at a time.
        which: image and completion of each sequence.
        first: the first step that is drawn.
        raster: of the images.
        drawn: what has been drawn since, as it is now.
        prefix: levels of the steps before; without one there are none.
        order: see `imagegen.generation.sampling_request.first_pixels`.
        kept: the steps whose values were given, wherever they are; none by default.
    """

    def __init__(
        self,
        progress: Progress | None,
        watch: Watch | None,
        which: Sequence[tuple[int, int]],
        first: int,
        raster: Raster,
        drawn: Callable[[], UInt8[np.ndarray, "b m s"]],
        prefix: UInt8[Tensor, "b first s"] | None = None,
        order: Bool[Tensor, "b h w"] | None = None,
        kept: Bool[np.ndarray, " n"] | None = None,
    ) -> None:
        self.progress, self.watch, self.drawn = progress, watch, drawn
        self.which, self.raster, self.prefix, self.order = tuple(which), raster, prefix, order
        self.kept = np.zeros(raster.length, bool) if kept is None else kept
        self.per_step = 1 / (raster.length - first)
        self.reached = np.full(len(which), first)
        self._next = 0.0
        self._busy = threading.Lock()

    def __call__(self, rows: slice, step: int) -> None:
        steps = int((step - self.reached[rows]).sum())
        self.reached[rows] = step
        if self.progress is not None:
            self.progress(steps * self.per_step)
        if self.watch is not None and self._busy.acquire(blocking=False):
            try:
                self._show(self.watch)
            finally:
                self._busy.release()

    def _show(self, watch: Watch) -> None:
        started = time.perf_counter()
        if started < self._next:
            return
        watch(self.snapshot())
        took = time.perf_counter() - started
        self._next = started + max(1 / PICTURES, took / SHARE)

    def snapshot(self) -> Snapshot:
        """The images as they are now."""
        # First how far they are: they continue meanwhile, and what is not counted is left out.
        reached = np.arange(self.raster.length) < self.reached[:, None]
        known = torch.from_numpy(reached | self.kept).unsqueeze(2)
        sequence = torch.from_numpy(self.drawn().copy())
        if self.prefix is not None:
            sequence = torch.cat([self.prefix.cpu(), sequence], dim=1)
        sequence = torch.where(known, sequence, 0)
        order = None if self.order is None else self.order.cpu()
        levels = self.raster.to_images(sequence, order).numpy()
        pixels = self.raster.to_images(known.expand_as(sequence).byte(), order).numpy()
        return Snapshot(self.which, levels, pixels.min(axis=3) > 0)
