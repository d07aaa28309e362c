"""Draws in compiled loops: micro-batches, teams of threads, and what they share.

Axes: `b` batch, `n` position, `s` value per step, `u` uniform number, `p` parameter, `e` width.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, UInt8
from torch import Tensor

from imagegen.core.machine import BLOCK, limited_threads, threads
from imagegen.generation.decode import Decoder, Particles, Reached, next_piece
from imagegen.generation.decode.attention import work_size
from imagegen.generation.decode.bf16 import Products
from imagegen.generation.decode.embedding import condition_of, order_of
from imagegen.generation.decode.integer import UNROLL
from imagegen.generation.decode.loop import Rows, Settings, run
from imagegen.generation.decode.matmul import TILE_ROWS
from imagegen.generation.decode.matrix import BF16
from imagegen.generation.decode.mixers import States, mixer_of, states_of
from imagegen.generation.decode.prepare import (
    choices_of,
    features_of,
    settings_of,
    weights_of,
    why_not,
)
from imagegen.generation.decode.team import ABANDONED, abandon, team_flags
from imagegen.heads.controls import Controls
from imagegen.heads.mixture_of_logistics import MixtureOfLogistics
from imagegen.model.block import Block
from imagegen.model.transformer import ImageTransformer, ModelState

MICRO_BATCH = 48
"""Rows that go through the layers together: many for the arithmetic, few for the caches."""
TEAM = 4
"""Threads that share the work of a micro-batch, at most, and at most one for each head."""
ROWS_ALONE = 6
"""Rows for each thread from which it pays that each goes through the layers by itself."""


class FusedDecoder(Decoder):
    """Draws from a model on the CPU; see `why_not`.

    Args:
        model: its weights are copied, as they are now.
        bits: 32 for float32, 16 or 8 for whole numbers (see `integer`), or `BF16` (see `bf16`).
    """

    def __init__(self, model: ImageTransformer, bits: int = 32) -> None:
        reason = why_not(model)
        if reason is not None:
            raise ValueError(reason)
        self.model = model
        layers = [mixer_of(block.attention) for block in cast(list[Block], model.blocks)]
        self.mix = layers[0].settings
        self.precision = {32: "32", BF16: "bf16"}.get(bits, f"int{bits}")
        self.variant = type(self.mix).__name__
        self.weights = weights_of(model, layers, bits)
        self.products, self.block = None, None
        if bits == BF16:
            self.products, self.block = Products(self.weights, BLOCK), BLOCK
        self.features = cast(MixtureOfLogistics, model.head).projection.out_features

    def draw(
        self,
        state: ModelState,
        parameters: Float[Tensor, "rows p"],
        sequence: UInt8[np.ndarray, "b n s"],
        noise: Float[np.ndarray, "kept m u"],
        controls: Controls,
        reached: Reached | None = None,
    ) -> None:
        """See `Decoder`."""
        first, length = state.position - 1, sequence.shape[1]
        settings = settings_of(self.model, self.mix, controls)
        copies = 1 if controls.guidance == 1 else 2
        parts, teams, members = self._shared_out(len(sequence) * copies)
        if copies > 1:
            state, parameters = _side_by_side(state, parameters, parts)
        self.loop_seconds = 0.0
        for start in range(0, len(parts), teams):
            own = parts[start : start + teams]
            together = [
                self._rows(members, part, state, parameters, sequence, noise, copies=copies)
                for part in own
            ]
            tell = [
                None if reached is None else _within(_of(part, copies), reached) for part in own
            ]
            started = time.perf_counter()
            self.go_through(settings, together, members, first, (first, length), True, tell)
            self.loop_seconds += time.perf_counter() - started

    def go_through(
        self,
        settings: Settings,
        together: Sequence[Rows],
        members: int,
        first: int,
        steps: tuple[int, int],
        draws: bool,
        tell: Sequence[Reached | None] = (),
    ) -> None:
        """Take rows through the steps from `steps[0]` to `steps[1]` - 1, with a team for each.

        Args:
            first: the step that the rows hold the distribution of at the beginning, and that the
                first of their uniform numbers belong to.
            draws: whether values are drawn.
            tell: for each of `together`, what is called with rows of it, see `Decoder.draw`.
        """
        start, stop = steps
        row_length = self.model.raster.row_length
        flags = [team_flags() for _ in together]

        def work(rows: Rows, team: int, member: int) -> None:
            reached = tell[team] if tell else None
            own = slice(*(len(rows.sequence) * each // members for each in (member, member + 1)))
            begin, piece = start, row_length if reached is None else 1
            try:
                with self._served(rows) as served:
                    while begin < stop:
                        end, started = min(begin + piece, stop), time.perf_counter()
                        which = (first, begin, end, begin == first, draws)
                        run(self.weights, settings, served, *which, flags[team], member, members)
                        if flags[team][ABANDONED]:
                            return
                        if reached is not None:
                            reached(own, end)
                            seconds = time.perf_counter() - started
                            piece = next_piece(end - begin, seconds, row_length)
                        begin = end
            except BaseException:
                abandon(flags[team])
                raise

        with self._limit(), ThreadPoolExecutor(len(together) * members) as pool:
            tasks = [
                pool.submit(work, rows, team, member)
                for team, rows in enumerate(together)
                for member in range(members)
            ]
            try:
                for task in wait(tasks, return_when=FIRST_EXCEPTION).done:
                    task.result()
            except BaseException:
                for own in flags:
                    abandon(own)
                raise

    def particles(
        self,
        state: ModelState,
        parameters: Float[Tensor, "b p"],
        sequence: UInt8[np.ndarray, "b n s"],
        noise: Float[np.ndarray, "b m u"],
        controls: Controls,
    ) -> FusedParticles | None:
        """See `Decoder`."""
        if controls.guidance != 1:
            return None
        parts, teams, members = self._shared_out(len(sequence))
        traced = self.model.raster.row_length
        rows = [
            self._rows(members, part, state, parameters, sequence, noise, traced) for part in parts
        ]
        settings = settings_of(self.model, self.mix, controls)
        return FusedParticles(
            self, settings, parts, rows, (teams, members), sequence, state.position - 1
        )

    def parameters(
        self,
        sequence: UInt8[np.ndarray, "b n s"],
        labels: Int64[np.ndarray, " b"] | None = None,
    ) -> Float[np.ndarray, "b n p"]:
        """See `Decoder`."""
        count, length = sequence.shape[:2]
        known = None if labels is None else torch.from_numpy(labels)
        state = self.model.initial_state(count, known)
        unknown = torch.zeros(count, self.weights.head.width)
        nothing = np.zeros((count, 0, 0))
        settings = settings_of(self.model, self.mix, Controls())
        found = []
        for part in _parts(count, 1, self.block):
            rows = self._rows(1, part, state, unknown, sequence, nothing, length)
            with self._limit(), self._served(rows) as served:
                run(self.weights, settings, served, 0, 0, length, False, False, team_flags(), 0, 1)
            found.append(rows.trace[..., : self.features])
        return np.concatenate(found)

    def _shared_out(self, rows: int) -> tuple[list[slice], int, int]:
        """Micro-batches, the number of teams of threads, and of the members of each."""
        teams, members = _teams(self.model, rows, self.products is not None)
        return _parts(rows, teams, self.block), teams, members

    def _served(self, rows: Rows) -> AbstractContextManager[Rows]:
        """Rows that may go through the loop in this thread while the block runs."""
        return nullcontext(rows) if self.products is None else self.products.serve(rows)

    def _limit(self) -> AbstractContextManager[None]:
        """Threads that go through the loop make their products alone while the block runs."""
        return nullcontext() if self.products is None else limited_threads(1)

    def _rows(
        self,
        members: int,
        part: slice,
        state: ModelState,
        parameters: Float[Tensor, "rows p"],
        sequence: UInt8[np.ndarray, "b n s"],
        noise: Float[np.ndarray, "kept m u"],
        traced: int = 0,
        copies: int = 1,
    ) -> Rows:
        """Copies of the states of some rows, views of their sequences, and room to work.

        `traced` is the number of steps of a call whose distributions are wanted, `copies` that of
        the rows of an image.
        """
        model, weights = self.model, self.weights
        count, width = part.stop - part.start, model.embedding.d_model

        def room(features: int, kind: type = np.float32) -> np.ndarray:
            return np.zeros((count, features), dtype=kind)

        known = room(weights.head.width)
        known[:, : parameters.shape[1]] = parameters[part].float().numpy()
        states = [
            states_of(block.attention, layer, part, sequence.shape[1])
            for block, layer in zip(cast(list[Block], model.blocks), state.layers, strict=True)
        ]
        s, z, keys, recent = (np.stack(arrays) for arrays in zip(*states, strict=True))
        inner = s.shape[2] * s.shape[4]
        features, order = features_of(model), order_of(state.canvas, part, sequence.shape[1])
        images, most = _of(part, copies), max(width, inner, features)
        own = sequence[images]
        if state.canvas is not None:
            drawn = max(state.position - 1, 0)
            own[:, :drawn] = state.canvas.first(drawn)[part][: len(own)].numpy()
        return Rows(
            s=s,
            z=z,
            keys=keys,
            recent=recent,
            ones=np.ones(s.shape[3], dtype=np.float32),
            order=order,
            sequence=own,
            label=condition_of(model, state, part),
            noise=noise[images],
            predicted=room(weights.prediction.table.shape[4]),
            x=room(width),
            before=room(width),
            given=room(weights.mix.width),
            mixed=room(inner),
            hidden=room(weights.up.width),
            y=room(max(weights.out.width, weights.down.width)),
            choices=np.zeros((members, choices_of(model)), dtype=np.float64),
            work=np.zeros(
                (members, work_size(s.shape[3], s.shape[4], sequence.shape[1])), np.float32
            ),
            whole=np.zeros((self.block or count, most + 2 * UNROLL), dtype=np.int16),
            steps=np.zeros(count, dtype=np.float32),
            parameters=known,
            trace=np.zeros((count, traced, known.shape[1]), dtype=np.float32),
        )


class FusedParticles(Particles):
    """Particles that go through the compiled loop.

    Args:
        decoder: compiled code.
        settings: how to draw.
        parts: the particles of each micro-batch.
        rows: the micro-batches, whose sequences are views of `sequence`.
        teams: how many work at the same time, and their members.
        sequence: see `Particles`.
        first: the step that the rows hold the distribution of.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        settings: Settings,
        parts: Sequence[slice],
        rows: Sequence[Rows],
        teams: tuple[int, int],
        sequence: UInt8[np.ndarray, "b n s"],
        first: int,
    ) -> None:
        self.decoder, self.settings, self.parts, self.rows = decoder, settings, parts, rows
        self.teams, self.members = teams
        self.sequence, self.first = sequence, first

    def draw(self, start: int, stop: int) -> None:
        self._go_through(start, stop, True)

    def score(self, start: int, stop: int) -> Float64[np.ndarray, " b"]:
        self._go_through(start, stop, False)
        features = self.decoder.features
        known = np.concatenate([rows.trace[:, : stop - start, :features] for rows in self.rows])
        values = torch.from_numpy(self.sequence[:, start:stop])
        log_prob = self.decoder.model.head.log_prob(torch.from_numpy(known), values)
        scores: np.ndarray = log_prob.double().sum(dim=(1, 2)).numpy()
        return scores

    def select(self, rows: Int64[np.ndarray, " b"]) -> None:
        self.sequence[:] = self.sequence[rows]
        for name in States._fields:
            states = [getattr(part, name) for part in self.rows]
            before = np.concatenate(states, axis=1)
            for part, after in zip(self.parts, states, strict=True):
                np.take(before, rows[part], axis=1, out=after)

    def _go_through(self, start: int, stop: int, draws: bool) -> None:
        for begin in range(0, len(self.rows), self.teams):
            together = self.rows[begin : begin + self.teams]
            steps = (start, stop)
            self.decoder.go_through(self.settings, together, self.members, self.first, steps, draws)


def _of(part: slice, copies: int) -> slice:
    """The images of some rows, of which each has as many copies."""
    return slice(part.start // copies, part.stop // copies)


def _side_by_side(
    state: ModelState, parameters: Float[Tensor, "rows p"], parts: Sequence[slice]
) -> tuple[ModelState, Float[Tensor, "drawn p"]]:
    """Rows in micro-batches, each of images and then of the same ones without labels.

    Args:
        state, parameters: of all images with labels, then without.
        parts: micro-batches.
    """
    images = [torch.arange(part.start // 2, part.stop // 2) for part in parts]
    without = len(parameters) // 2
    index = torch.cat([rows + shift for rows in images for shift in (0, without)])
    return state.select(index), parameters[index]


def _within(part: slice, reached: Reached) -> Reached:
    """`reached` for rows that are counted from the first of `part`."""

    def tell(rows: slice, step: int) -> None:
        reached(slice(part.start + rows.start, part.start + rows.stop), step)

    return tell


def _teams(model: ImageTransformer, rows: int, alone: bool = False) -> tuple[int, int]:
    """The number of teams of threads, and of the members of each: one where they work `alone`."""
    count = int(threads().value)
    heads = cast(Block, model.blocks[0]).attention.n_heads
    members = 1 if alone or rows >= ROWS_ALONE * count else min(count, heads, TEAM)
    return count // members, members


def _parts(rows: int, teams: int, block: int | None) -> list[slice]:
    """Micro-batches: of about the same size, in whole tiles, and as many for each team.

    They are blocks of that many rows instead where there is a number.
    """
    if block is not None:
        sizes = [block] * math.ceil(rows / block)
    else:
        tiles = math.ceil(rows / TILE_ROWS)
        count = min(tiles, math.ceil(rows / MICRO_BATCH / teams) * teams)
        # The larger ones first, as teams wait for each other.
        sizes = [TILE_ROWS * ((tiles + count - 1 - part) // count) for part in range(count)]
    stops = [0, *itertools.accumulate(sizes)]
    return [slice(start, min(stop, rows)) for start, stop in itertools.pairwise(stops)]
