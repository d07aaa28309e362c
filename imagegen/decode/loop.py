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
from numba import njit

from imagegen.decode.attention import decayed_attention, linear_attention, softmax_attention
from imagegen.decode.elementwise import activate, activate_gated, add_scaled, normalize
from imagegen.decode.embedding import embed
from imagegen.decode.matmul import PANEL
from imagegen.decode.matrix import Matrix, multiply, round_rows
from imagegen.decode.mixers import LINEAR, SOFTMAX, MixSettings
from imagegen.decode.sampling import draw_categorical, draw_mixture
from imagegen.decode.team import meet, share


class Weights(NamedTuple):
    """A model, prepared; float32 where nothing else is said.

    `mix` has a group of outputs for each head, `rates`, `mix_norm` and `convolution` are those of
    `mixers.Mixer`; `angles` are the cosines and sines of the positions.
    """

    lags: Int64[np.ndarray, "k"]
    inside: Bool[np.ndarray, "n k"]
    table: Float32[np.ndarray, "k s v e"]
    place: Float32[np.ndarray, "n e"]
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
    choice_temperature: float
    scale_temperature: float


class Rows(NamedTuple):
    """What goes through the layers together, and memory to work with, shared by a team.

    Attributes:
        s, z, keys, recent: states of all layers, changed; see `mixers.States`.
        ones: decays of mechanisms that have none.
        sequence: levels; those that are drawn are written.
        context: added to the embedding.
        noise: uniform numbers of the steps from the first one drawn.
        x: what runs through the layers.
        before: inputs of the layers, normalised.
        given, mixed: what the heads are given and return.
        hidden: of the feed-forward layer.
        y: what is added to x.
        whole, steps: rows as whole numbers; see `matrix.round_rows`.
        parameters: of the distribution of the step; at the end, of the last one.
    """

    s: Float32[np.ndarray, "l r h d m"]
    z: Float32[np.ndarray, "l r h d"]
    keys: Float32[np.ndarray, "l r h d n"]
    recent: Float32[np.ndarray, "l r w h c"]
    ones: Float32[np.ndarray, "d"]
    sequence: UInt8[np.ndarray, "r n s"]
    context: Float32[np.ndarray, "r e"]
    noise: Float64[np.ndarray, "r n u"]
    x: Float32[np.ndarray, "r e"]
    before: Float32[np.ndarray, "r e"]
    given: Float32[np.ndarray, "r hg"]
    mixed: Float32[np.ndarray, "r hm"]
    hidden: Float32[np.ndarray, "r f"]
    y: Float32[np.ndarray, "r o"]
    whole: Int16[np.ndarray, "r i"]
    steps: Float32[np.ndarray, "r"]
    parameters: Float32[np.ndarray, "r p"]


@no_type_check
@njit(cache=True, nogil=True, error_model="numpy")
def _product(source, m, layer, rows, out, member, members):
    """The member's panels of a product with rows that all have been rounded."""
    first, stop = share(m.bias.shape[1] // PANEL, member, members)
    multiply(source, rows.whole, rows.steps, m, layer, first, stop, out)


@no_type_check
@njit(cache=True, nogil=True, error_model="numpy")
def _mix(w, mix, rows, layer, position, first, stop):
    """What the heads from `first` to `stop` - 1 return."""
    given, s, y = rows.given, rows.s[layer], rows.mixed
    if mix.kind == LINEAR:
        linear_attention(given, s, rows.z[layer], rows.ones, mix, first, stop, y)
    elif mix.kind == SOFTMAX:
        softmax_attention(given, s, rows.keys[layer], position, first, stop, y)
    else:
        decayed_attention(
            given,
            s,
            rows.recent[layer],
            mix,
            w.rates[layer],
            w.mix_norm[layer],
            w.convolution[layer],
            w.angles[position],
            first,
            stop,
            y,
        )


@no_type_check
@njit(cache=True, nogil=True, error_model="numpy")
def parameters_at(w, settings, rows, position, flags, member, members):
    """The distribution of one step, into `rows.parameters`; changes the states.

    Args:
        w, settings: the model.
        rows: what it is for; see `Rows`.
        position: the step.
        flags, member, members: of the team; see `team`.
    """
    x, before, given, mixed, y = rows.x, rows.before, rows.given, rows.mixed, rows.y
    whole, steps, width = rows.whole, rows.steps, rows.x.shape[1]
    eps, centred = settings.norm_eps, settings.centred
    first, stop = share(x.shape[0], member, members)
    heads = rows.s.shape[2]
    head_first, head_stop = share(heads, member, members)
    panels = w.mix.bias.shape[1] // heads // PANEL
    embed(
        rows.sequence,
        position,
        w.lags,
        w.inside,
        w.table,
        w.place,
        rows.context,
        x,
        first,
        stop,
    )
    for layer in range(w.norms.shape[0]):
        norms, scales = w.norms[layer], w.scales[layer]
        if settings.norm_first:
            normalize(x, norms[0, 0], norms[0, 1], eps, centred, before, first, stop)
        else:
            before[first:stop] = x[first:stop]
        round_rows(before, width, w.mix, whole, steps, first, stop)
        meet(flags, members)
        multiply(before, whole, steps, w.mix, layer, head_first * panels, head_stop * panels, given)
        _mix(w, settings.mix, rows, layer, position, head_first, head_stop)
        meet(flags, members)
        round_rows(mixed, mixed.shape[1], w.out, whole, steps, first, stop)
        meet(flags, members)
        _product(mixed, w.out, layer, rows, y, member, members)
        meet(flags, members)
        add_scaled(x, y, scales[0], first, stop)
        if settings.norm_first:
            normalize(x, norms[1, 0], norms[1, 1], eps, centred, before, first, stop)
        else:
            normalize(x, norms[0, 0], norms[0, 1], eps, centred, x, first, stop)
            before[first:stop] = x[first:stop]
        round_rows(before, width, w.up, whole, steps, first, stop)
        meet(flags, members)
        _product(before, w.up, layer, rows, rows.hidden, member, members)
        meet(flags, members)
        if settings.gated:
            activate_gated(rows.hidden, settings.features, settings.activation, first, stop)
        else:
            activate(rows.hidden, settings.features, settings.activation, first, stop)
        round_rows(rows.hidden, settings.features, w.down, whole, steps, first, stop)
        meet(flags, members)
        _product(rows.hidden, w.down, layer, rows, y, member, members)
        meet(flags, members)
        add_scaled(x, y, scales[1], first, stop)
        if not settings.norm_first:
            normalize(x, norms[1, 0], norms[1, 1], eps, centred, x, first, stop)
    normalize(x, w.last_norm[0], w.last_norm[1], eps, centred, before, first, stop)
    round_rows(before, width, w.head, whole, steps, first, stop)
    meet(flags, members)
    _product(before, w.head, 0, rows, rows.parameters, member, members)
    meet(flags, members)


@no_type_check
@njit(cache=True, nogil=True, error_model="numpy")
def run(w, settings, rows, first, start, stop, known, flags, member, members):
    """Draw steps `start` to `stop` - 1 of each row.

    Args:
        w, settings: the model.
        rows: what is drawn; see `Rows`.
        first: the step that the first of `rows.noise` belongs to.
        start, stop: positions.
        known: whether `rows.parameters` hold the distribution of step `start` already.
        flags, member, members: of the team; see `team`.
    """
    own_first, own_stop = share(rows.x.shape[0], member, members)
    work = np.empty(settings.components, dtype=np.float64)
    for position in range(start, stop):
        if position > start or not known:
            parameters_at(w, settings, rows, position, flags, member, members)
        values, uniforms = rows.sequence[:, position], rows.noise[:, position - first]
        if settings.mixture:
            draw_mixture(
                rows.parameters,
                uniforms,
                settings.choice_temperature,
                settings.scale_temperature,
                settings.levels,
                work,
                values,
                own_first,
                own_stop,
            )
        else:
            draw_categorical(
                rows.parameters,
                uniforms,
                settings.choice_temperature,
                work,
                values,
                own_first,
                own_stop,
            )
    # A later call begins with the same shares, so that nobody has to be waited for here.
