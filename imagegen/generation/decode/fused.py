"""Draws in compiled loops: micro-batches, teams of threads, and what they share.

Axes: `b` batch, `n` position, `s` value per step, `u` uniform number, `p` parameter, `e` width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from imagegen.core.machine import threads
from imagegen.generation.decode import Decoder
from imagegen.generation.decode.attention import work_size
from imagegen.generation.decode.embedding import order_of
from imagegen.generation.decode.integer import UNROLL
from imagegen.generation.decode.loop import Rows, run
from imagegen.generation.decode.matmul import TILE_ROWS
from imagegen.generation.decode.mixers import mixer_of, states_of
from imagegen.generation.decode.prepare import (
    components_of,
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
        bits: 32 for float32, or 16 or 8 for whole numbers; see `integer`.
    """

    def __init__(self, model: ImageTransformer, bits: int = 32) -> None:
        reason = why_not(model)
        if reason is not None:
            raise ValueError(reason)
        self.model = model
        layers = [mixer_of(block.attention) for block in cast(list[Block], model.blocks)]
        self.mix = layers[0].settings
        self.precision = "32" if bits == 32 else f"int{bits}"
        self.variant = type(self.mix).__name__
        self.weights = weights_of(model, layers, bits)

    def draw(
        self,
        state: ModelState,
        parameters: Float[Tensor, "rows p"],
        sequence: UInt8[np.ndarray, "b n s"],
        noise: Float[np.ndarray, "rows m u"],
        controls: Controls,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """See `Decoder`."""
        first, length = state.position - 1, sequence.shape[1]
        settings = settings_of(self.model, self.mix, controls)
        teams, members = _teams(self.model, len(sequence))
        parts = _parts(len(sequence), teams)
        flags = [team_flags() for _ in range(teams)]
        self.loop_seconds = 0.0

        def work(rows: Rows, team: int, member: int) -> None:
            try:
                for begin in range(first, length, self.model.raster.row_length):
                    end = min(begin + self.model.raster.row_length, length)
                    steps = (first, begin, end, begin == first)
                    run(self.weights, settings, rows, *steps, True, flags[team], member, members)
                    if flags[team][ABANDONED]:
                        return
                    if progress is not None and member == 0:
                        progress(len(rows.x) * (end - begin) / (length - first))
            except BaseException:
                abandon(flags[team])
                raise

        with ThreadPoolExecutor(teams * members) as pool:
            for start in range(0, len(parts), teams):
                together = [
                    self._rows(members, part, state, parameters, sequence, noise)
                    for part in parts[start : start + teams]
                ]
                started = time.perf_counter()
                tasks = [
                    pool.submit(work, rows, team, member)
                    for team, rows in enumerate(together)
                    for member in range(members)
                ]
                try:
                    for task in tasks:
                        task.result()
                except BaseException:
                    for own in flags:
                        abandon(own)
                    raise
                self.loop_seconds += time.perf_counter() - started

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
        rows = self._rows(1, slice(0, count), state, unknown, sequence, np.zeros((count, 0, 0)))
        settings, flags = settings_of(self.model, self.mix, Controls()), team_flags()
        features = cast(MixtureOfLogistics, self.model.head).projection.out_features
        result = np.empty((count, length, features), dtype=np.float32)
        for position in range(length):
            run(
                self.weights,
                settings,
                rows,
                0,
                position,
                position + 1,
                False,
                False,
                flags,
                0,
                1,
            )
            result[:, position] = rows.parameters[:, :features]
        return result

    def _rows(
        self,
        members: int,
        part: slice,
        state: ModelState,
        parameters: Float[Tensor, "rows p"],
        sequence: UInt8[np.ndarray, "b n s"],
        noise: Float[np.ndarray, "rows m u"],
    ) -> Rows:
        """Copies of the states of some rows, views of their sequences, and room to work."""
        model, weights = self.model, self.weights
        count, width = part.stop - part.start, model.embedding.d_model

        def room(features: int, kind: type = np.float32) -> np.ndarray:
            return np.zeros((count, features), dtype=kind)

        # The last condition is that of no label.
        label = np.full(count, len(weights.condition) - 1)
        if state.labels is not None:
            own = state.labels[part].numpy()
            label = np.where(own < 0, label, own)
        known = room(weights.head.width)
        known[:, : parameters.shape[1]] = parameters[part].float().numpy()
        states = [
            states_of(block.attention, layer, part, sequence.shape[1])
            for block, layer in zip(cast(list[Block], model.blocks), state.layers, strict=True)
        ]
        s, z, keys, recent = (np.stack(arrays) for arrays in zip(*states, strict=True))
        inner = s.shape[2] * s.shape[4]
        features, order = features_of(model), order_of(state.canvas, part, sequence.shape[1])
        own = sequence[part]
        if state.canvas is not None:
            drawn = max(state.position - 1, 0)
            own[:, :drawn] = state.canvas.first(drawn)[part].numpy()
        return Rows(
            s=s,
            z=z,
            keys=keys,
            recent=recent,
            ones=np.ones(s.shape[3], dtype=np.float32),
            order=order,
            sequence=own,
            label=label,
            noise=noise[part],
            predicted=room(weights.prediction.table.shape[4]),
            x=room(width),
            before=room(width),
            given=room(weights.mix.width),
            mixed=room(inner),
            hidden=room(weights.up.width),
            y=room(max(weights.out.width, weights.down.width)),
            choices=np.zeros((members, components_of(model)), dtype=np.float64),
            work=np.zeros(
                (members, work_size(s.shape[3], s.shape[4], sequence.shape[1])), np.float32
            ),
            whole=room(max(width, inner, features) + 2 * UNROLL, np.int16),
            steps=np.zeros(count, dtype=np.float32),
            parameters=known,
        )


def _teams(model: ImageTransformer, rows: int) -> tuple[int, int]:
    """The number of teams of threads, and of the members of each."""
    count = int(threads().value)
    heads = cast(Block, model.blocks[0]).attention.n_heads
    members = 1 if rows >= ROWS_ALONE * count else min(count, heads, TEAM)
    return count // members, members


def _parts(rows: int, teams: int) -> list[slice]:
    """Micro-batches of about the same size, at least one for each team where there are rows."""
    wanted = max(teams, math.ceil(rows / MICRO_BATCH))
    size = math.ceil(math.ceil(rows / wanted) / TILE_ROWS) * TILE_ROWS
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
