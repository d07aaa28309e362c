"""Generation in one compiled loop: no Python between two pixels.

A team of threads goes through it together. What is done to each row by itself is shared out by
rows, matrix products by panels of outputs, attention by heads; in between, they meet.

Axes: `l` layer, `r` row, `n` position, `s` value a step, `u` uniform number, `e` model width, `o`
output of a layer.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int16, Int64, UInt8
from numba.extending import overload

from imagegen.generation.decode.attention import (
    decayed_attention,
    linear_attention,
    softmax_attention,
)
from imagegen.generation.decode.compile import compiled
from imagegen.generation.decode.elementwise import activate, add_scaled, copy, normalize
from imagegen.generation.decode.embedding import embed, predict
from imagegen.generation.decode.matmul import PANEL
from imagegen.generation.decode.matrix import Matrix, multiply, round_rows
from imagegen.generation.decode.mixers import LinearMix, MixSettings, SoftmaxMix
from imagegen.generation.decode.sampling import draw_categorical, draw_mixture, lay_around
from imagegen.generation.decode.team import meet, share


class Weights(NamedTuple):
    """A model, prepared; float32 where nothing else is said.

    `mix` has a group of outputs for each head, `rates`, `mix_norm` and `convolution` are those of
    `mixers.Mixer`; `angles` are the cosines and sines of the positions.
    """

    lags: Int64[np.ndarray, " k"]
    inside: Bool[np.ndarray, "n k"]
    table: Float32[np.ndarray, "k s v e"]
    place: Float32[np.ndarray, "n e"]
    condition: Float32[np.ndarray, "labels areas e"]
    area: Int64[np.ndarray, " n"]
    prediction: Float32[np.ndarray, "k s v p"]
    mix: Matrix
    rates: Float32[np.ndarray, "l h"]
    mix_norm: Float32[np.ndarray, "l weight_bias m"]
    convolution: Float32[np.ndarray, "l w h c"]
    angles: Float32[np.ndarray, "n half_d two"]
    out: Matrix
    up: Matrix
    down: Matrix
    norms: Float32[np.ndarray, "l two weight_bias e"]
    last_norm: Float32[np.ndarray, "weight_bias e"]
    scales: Float32[np.ndarray, "l two e"]
    head: Matrix


class Settings(NamedTuple):
    """What else the loop has to know of a model and of how to draw."""

    mix: MixSettings
    features: int  # of the feed-forward layer
    norm_first: bool
    centred: bool  # LayerNorm, not RMSNorm
    norm_eps: np.float32
    activation: int
    gated: bool
    mixture: bool  # or categorical
    components: int  # of the mixture; or levels
    levels: int
    residual_unit: float
    choice_temperature: float
    scale_temperature: float


class Rows(NamedTuple):
    """What goes through the layers together, and memory to work with, shared by a team.

    Attributes:
        s, z, keys, recent: states of all layers, changed; see `mixers.States`.
        ones: decays of mechanisms that have none.
        sequence: levels; those that are drawn are written.
        label: the row of `Weights.condition` that is added to the embedding.
        noise: uniform numbers of the steps from the first one drawn.
        predicted: the linear prediction of the step's values; without columns where there is none.
        x: what runs through the layers.
        before: inputs of the layers, normalised.
        given, mixed: what the heads are given and return.
        hidden: of the feed-forward layer.
        y: what is added to x.
        choices, work: of each member of the team, to work with; see `work_size`.
        whole, steps: rows as whole numbers; see `matrix.round_rows`.
        parameters: of the distribution of the step; at the end, of the last one.
    """

    s: Float32[np.ndarray, "l r h d m"]
    z: Float32[np.ndarray, "l r h d"]
    keys: Float32[np.ndarray, "l r h d n"]
    recent: Float32[np.ndarray, "l r w h c"]
    ones: Float32[np.ndarray, " d"]
    sequence: UInt8[np.ndarray, "r n s"]
    label: Int64[np.ndarray, " r"]
    noise: Float64[np.ndarray, "r n u"]
    predicted: Float32[np.ndarray, "r p"]
    x: Float32[np.ndarray, "r e"]
    before: Float32[np.ndarray, "r e"]
    given: Float32[np.ndarray, "r hg"]
    mixed: Float32[np.ndarray, "r hm"]
    hidden: Float32[np.ndarray, "r f"]
    y: Float32[np.ndarray, "r o"]
    choices: Float64[np.ndarray, "members k"]
    work: Float32[np.ndarray, "members size"]
    whole: Int16[np.ndarray, "r i"]
    steps: Float32[np.ndarray, " r"]
    parameters: Float32[np.ndarray, "r p"]


@no_type_check
def _mix(mix, w, rows, layer, position, work, first, stop):
    """What the heads from `first` to `stop` - 1 return, into `rows.mixed`."""
    raise NotImplementedError("compiled code only")


@no_type_check
@overload(_mix, inline="always")
def _mix_of_its_kind(mix, w, rows, layer, position, work, first, stop):
    """The loop of the mechanism at hand, so that the others need not be compiled."""
    if mix.instance_class is LinearMix:

        def attend(mix, w, rows, layer, position, work, first, stop):
            s, z = rows.s[layer], rows.z[layer]
            linear_attention(rows.given, s, z, rows.ones, mix, first, stop, rows.mixed)

    elif mix.instance_class is SoftmaxMix:

        def attend(mix, w, rows, layer, position, work, first, stop):
            values, keys = rows.s[layer], rows.keys[layer]
            softmax_attention(rows.given, values, keys, position, work, first, stop, rows.mixed)

    else:

        def attend(mix, w, rows, layer, position, work, first, stop):
            decayed_attention(
                rows.given,
                rows.s[layer],
                rows.recent[layer],
                mix,
                w.rates[layer],
                w.mix_norm[layer],
                w.convolution[layer],
                w.angles[position],
                work,
                first,
                stop,
                rows.mixed,
            )

    return attend


@no_type_check
@compiled()
def run(w, settings, rows, first, start, stop, known, draws, flags, member, members):
    """Go through steps `start` to `stop` - 1 of each row: their distributions, and drawing.

    Args:
        w, settings: the model.
        rows: what is drawn; see `Rows`.
        first: the step that the first of `rows.noise` belongs to.
        start, stop: positions.
        known: whether `rows.parameters` hold the distribution of step `start` already.
        draws: whether values are drawn; without, those of `rows.sequence` stay.
        flags, member, members: of the team; see `team`.
    """
    x, before, given, mixed, y = rows.x, rows.before, rows.given, rows.mixed, rows.y
    hidden, parameters, whole, steps = rows.hidden, rows.parameters, rows.whole, rows.steps
    sequence, choices = rows.sequence, rows.choices[member]
    heads, work = rows.s.shape[2], rows.work[member]
    mix_in, mix_out, up, down, head = w.mix, w.out, w.up, w.down, w.head
    eps, centred, width = settings.norm_eps, settings.centred, x.shape[1]
    own_first, own_stop = share(x.shape[0], member, members)
    head_first, head_stop = share(heads, member, members)
    panels = mix_in.bias.shape[1] // heads // PANEL
    out_first, out_stop = share(mix_out.bias.shape[1] // PANEL, member, members)
    up_first, up_stop = share(up.bias.shape[1] // PANEL, member, members)
    down_first, down_stop = share(down.bias.shape[1] // PANEL, member, members)
    last_first, last_stop = share(head.bias.shape[1] // PANEL, member, members)
    for position in range(start, stop):
        if position > start or not known:
            embed(
                sequence,
                position,
                w.lags,
                w.inside,
                w.table,
                w.place,
                w.condition,
                w.area,
                rows.label,
                x,
                own_first,
                own_stop,
            )
            for layer in range(w.norms.shape[0]):
                norms, scales = w.norms[layer], w.scales[layer]
                if settings.norm_first:
                    normalize(
                        x, norms[0, 0], norms[0, 1], eps, centred, before, own_first, own_stop
                    )
                else:
                    copy(x, before, own_first, own_stop)
                round_rows(before, width, mix_in.bits, whole, steps, own_first, own_stop)
                meet(flags, members)
                multiply(
                    before,
                    whole,
                    steps,
                    mix_in,
                    layer,
                    head_first * panels,
                    head_stop * panels,
                    given,
                )
                _mix(settings.mix, w, rows, layer, position, work, head_first, head_stop)
                meet(flags, members)
                round_rows(mixed, mixed.shape[1], mix_out.bits, whole, steps, own_first, own_stop)
                meet(flags, members)
                multiply(mixed, whole, steps, mix_out, layer, out_first, out_stop, y)
                meet(flags, members)
                add_scaled(x, y, scales[0], own_first, own_stop)
                if settings.norm_first:
                    normalize(
                        x, norms[1, 0], norms[1, 1], eps, centred, before, own_first, own_stop
                    )
                else:
                    normalize(x, norms[0, 0], norms[0, 1], eps, centred, x, own_first, own_stop)
                    copy(x, before, own_first, own_stop)
                round_rows(before, width, up.bits, whole, steps, own_first, own_stop)
                meet(flags, members)
                multiply(before, whole, steps, up, layer, up_first, up_stop, hidden)
                meet(flags, members)
                activate(
                    hidden,
                    settings.features,
                    settings.gated,
                    settings.activation,
                    own_first,
                    own_stop,
                )
                round_rows(hidden, settings.features, down.bits, whole, steps, own_first, own_stop)
                meet(flags, members)
                multiply(hidden, whole, steps, down, layer, down_first, down_stop, y)
                meet(flags, members)
                add_scaled(x, y, scales[1], own_first, own_stop)
                if not settings.norm_first:
                    normalize(x, norms[1, 0], norms[1, 1], eps, centred, x, own_first, own_stop)
            normalize(x, w.last_norm[0], w.last_norm[1], eps, centred, before, own_first, own_stop)
            round_rows(before, width, head.bits, whole, steps, own_first, own_stop)
            meet(flags, members)
            multiply(before, whole, steps, head, 0, last_first, last_stop, parameters)
            meet(flags, members)
            if rows.predicted.shape[1] > 0:
                predict(
                    sequence,
                    position,
                    w.lags,
                    w.inside,
                    w.prediction,
                    rows.predicted,
                    own_first,
                    own_stop,
                )
                lay_around(
                    parameters,
                    rows.predicted,
                    settings.components,
                    settings.residual_unit,
                    own_first,
                    own_stop,
                )
        if not draws:
            continue
        values, uniforms = sequence[:, position], rows.noise[:, position - first]
        if settings.mixture:
            draw_mixture(
                parameters,
                uniforms,
                settings.choice_temperature,
                settings.scale_temperature,
                settings.levels,
                choices,
                values,
                own_first,
                own_stop,
            )
        else:
            draw_categorical(
                parameters,
                uniforms,
                settings.choice_temperature,
                choices,
                values,
                own_first,
                own_stop,
            )
    # A later call begins with the same shares, so that nobody has to be waited for here.
