"""Which models the compiled loops can draw from, and how their weights are prepared.

Axes: `b` batch, `n` position, `s` value a step, `u` uniform number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from imagegen.block import Block, GatedLinearUnit
from imagegen.decode import Decoder, mixers
from imagegen.decode.attention import work_size
from imagegen.decode.elementwise import ACTIVATIONS
from imagegen.decode.embedding import tables_of
from imagegen.decode.integer import UNROLL
from imagegen.decode.loop import Rows, Settings, Weights, run
from imagegen.decode.matmul import PANEL, TILE_ROWS
from imagegen.decode.matrix import Matrix, matrix
from imagegen.decode.mixers import Mixer, MixSettings, angles, mixer_of, states_of
from imagegen.decode.team import ABANDONED, abandon, team_flags
from imagegen.embedding import Neighbourhood, ValueAndSinusoid
from imagegen.heads.categorical import Categorical
from imagegen.heads.controls import Controls
from imagegen.heads.mixture_of_logistics import MixtureOfLogistics
from imagegen.model import ImageTransformer, ModelState

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
        self.weights = _weights(model, layers, bits)

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
        settings = _settings(self.model, self.mix, controls)
        teams, members = _teams(self.model, len(sequence))
        parts = _parts(len(sequence), teams)
        flags = [team_flags() for _ in range(teams)]

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

    def parameters(
        self,
        sequence: UInt8[np.ndarray, "b n s"],
        context: Float[np.ndarray, "b e"] | None = None,
    ) -> Float[np.ndarray, "b n p"]:
        """See `Decoder`."""
        count, length = sequence.shape[:2]
        state = self.model.initial_state(count)
        if context is not None:
            state.context = torch.from_numpy(context)
        known = torch.zeros(count, self.weights.head.width)
        rows = self._rows(1, slice(0, count), state, known, sequence, np.zeros((count, 0, 0)))
        settings, flags = _settings(self.model, self.mix, Controls()), team_flags()
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

        context = room(width)
        if state.context is not None:
            context += state.context[part].float().numpy()
        known = room(weights.head.width)
        known[:, : parameters.shape[1]] = parameters[part].float().numpy()
        states = [
            states_of(block.attention, layer, part, sequence.shape[1])
            for block, layer in zip(cast(list[Block], model.blocks), state.layers, strict=True)
        ]
        s, z, keys, recent = (np.stack(arrays) for arrays in zip(*states, strict=True))
        inner = s.shape[2] * s.shape[4]
        features = _features(model)
        return Rows(
            s=s,
            z=z,
            keys=keys,
            recent=recent,
            ones=np.ones(s.shape[3], dtype=np.float32),
            sequence=sequence[part],
            context=context,
            noise=noise[part],
            x=room(width),
            before=room(width),
            given=room(weights.mix.width),
            mixed=room(inner),
            hidden=room(weights.up.width),
            y=room(max(weights.out.width, weights.down.width)),
            choices=np.zeros((members, _components(model)), dtype=np.float64),
            work=np.zeros(
                (members, work_size(s.shape[3], s.shape[4], sequence.shape[1])), np.float32
            ),
            whole=room(max(width, inner, features) + 2 * UNROLL, np.int16),
            steps=np.zeros(count, dtype=np.float32),
            parameters=known,
        )


def _teams(model: ImageTransformer, rows: int) -> tuple[int, int]:
    """The number of teams of threads, and of the members of each."""
    threads = torch.get_num_threads()
    heads = cast(Block, model.blocks[0]).attention.n_heads
    members = 1 if rows >= ROWS_ALONE * threads else min(threads, heads, TEAM)
    return threads // members, members


def _parts(rows: int, teams: int) -> list[slice]:
    """Micro-batches of about the same size, at least one for each team where there are rows."""
    wanted = max(teams, math.ceil(rows / MICRO_BATCH))
    size = math.ceil(math.ceil(rows / wanted) / TILE_ROWS) * TILE_ROWS
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def why_not(model: ImageTransformer) -> str | None:
    """Why the compiled loop cannot draw from this model; None where it can."""
    if model.norm.weight.dtype != torch.float32:
        return f"weights of {str(model.norm.weight.dtype).removeprefix('torch.')}"
    if model.device.type != "cpu":
        return "the model does not lie on the CPU"
    if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
        return "weights that are not finite"
    if not isinstance(model.embedding, (ValueAndSinusoid, Neighbourhood)):
        return f"no tables for {type(model.embedding).__name__}"
    if not isinstance(model.head, (MixtureOfLogistics, Categorical)):
        return f"no sampler for {type(model.head).__name__}"
    blocks = cast(list[Block], list(model.blocks))
    if len({type(block.attention) for block in blocks}) > 1:
        return "no loop for several mechanisms"
    for block in blocks:
        reason = mixers.why_not(block.attention)
        if reason is not None:
            return reason
        if block.convolution is not None:
            return "no loop for convolutions"
    return None


def _matrix(layers: list[nn.Linear], bits: int) -> Matrix:
    weights = [layer.weight.detach().float().numpy() for layer in layers]
    return matrix(weights, [layer.bias.detach().float().numpy() for layer in layers], bits)


def _groups(layers: list[Mixer], bits: int) -> Matrix:
    """The projections to the heads' groups, each group padded to whole panels."""
    _, group, inputs = layers[0].weight.shape
    padding = (0, -group % PANEL)
    weights = [np.pad(layer.weight, ((0, 0), padding, (0, 0))) for layer in layers]
    biases = [np.pad(layer.bias, ((0, 0), padding)) for layer in layers]
    return matrix([w.reshape(-1, inputs) for w in weights], [b.reshape(-1) for b in biases], bits)


def _norm(norm: nn.Module) -> np.ndarray:
    weight = cast(Tensor, norm.weight).detach().float().numpy()
    bias = getattr(norm, "bias", None)
    zero = np.zeros_like(weight)
    return np.stack([weight, zero if bias is None else bias.detach().float().numpy()])


def _components(model: ImageTransformer) -> int:
    """Of the mixture; or levels."""
    head = model.head
    return head.n_mixtures if isinstance(head, MixtureOfLogistics) else model.spec.levels


def _features(model: ImageTransformer) -> int:
    """Of the feed-forward layer."""
    return cast(nn.Linear, cast(Block, model.blocks[0]).feed_forward[-1]).in_features


def _scales(block: Block, width: int) -> np.ndarray:
    ones = torch.ones(width)
    scales = [ones if t is None else t.detach().float() for t in (block.scale1, block.scale2)]
    return torch.stack(scales).numpy()


def _weights(model: ImageTransformer, layers: list[Mixer], bits: int) -> Weights:
    tables = tables_of(cast(ValueAndSinusoid | Neighbourhood, model.embedding))
    blocks = cast(list[Block], list(model.blocks))
    return Weights(
        tables.lags,
        tables.inside,
        tables.table,
        tables.place,
        mix=_groups(layers, bits),
        rates=np.stack([layer.rates for layer in layers]),
        mix_norm=np.stack([layer.norm for layer in layers]),
        convolution=np.stack([layer.convolution for layer in layers]),
        angles=angles(layers[0].settings.d, model.raster.length),
        out=matrix(
            [layer.out_weight for layer in layers], [layer.out_bias for layer in layers], bits
        ),
        up=_matrix([cast(nn.Linear, block.feed_forward[0]) for block in blocks], bits),
        down=_matrix([cast(nn.Linear, block.feed_forward[-1]) for block in blocks], bits),
        norms=np.stack([np.stack([_norm(block.norm1), _norm(block.norm2)]) for block in blocks]),
        last_norm=_norm(model.norm),
        scales=np.stack([_scales(block, model.embedding.d_model) for block in blocks]),
        # The distribution's own numbers, and few: not rounded.
        head=_matrix([cast(MixtureOfLogistics, model.head).projection], 32),
    )


def _settings(model: ImageTransformer, mix: MixSettings, controls: Controls) -> Settings:
    block = cast(Block, model.blocks[0])
    nonlinear = block.feed_forward[1]
    gated = isinstance(nonlinear, GatedLinearUnit)
    activation = nonlinear.activation if isinstance(nonlinear, GatedLinearUnit) else nonlinear
    mixture = isinstance(model.head, MixtureOfLogistics)
    given = cast(float | None, model.norm.eps)
    eps = torch.finfo(torch.float32).eps if given is None else given  # RMSNorm's default
    return Settings(
        mix,
        _features(model),
        block.norm_first,
        isinstance(model.norm, nn.LayerNorm),
        np.float32(eps),
        ACTIVATIONS[type(activation).__name__.lower()],
        gated,
        mixture,
        _components(model),
        model.spec.levels,
        float(controls.for_mixture if mixture else controls.temperature),
        float(controls.for_scale if mixture else 1.0),
    )
