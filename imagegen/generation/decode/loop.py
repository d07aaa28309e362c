"""Generation in one compiled loop: no Python between two pixels.

A team of threads goes through it together. What is done to each row by itself is shared out by
rows, matrix products by panels of outputs, attention by heads; in between, they meet.

Axes: `l` layer, `r` row, `n` position, `s` value per step, `u` uniform number, `e` model width, `o`
output of a layer.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float32, Float64, Int16, Int64, UInt8
from numba.extending import overload

from imagegen.core.compiled.compile import compiled, inline
from imagegen.core.compiled.elementwise import activate, add_scaled, copy, normalize
from imagegen.generation.decode.attention import (
    decayed_attention,
    linear_attention,
    softmax_attention,
)
from imagegen.generation.decode.embedding import (
    EmbeddingTables,
    Order,
    PredictionTables,
    embed,
    predict,
)
from imagegen.generation.decode.matmul import PANEL
from imagegen.generation.decode.matrix import Matrix, multiply, round_rows
from imagegen.generation.decode.mixers import LinearMix, MixSettings, SoftmaxMix
from imagegen.generation.decode.sampling import (
    draw_categorical,
    draw_mixture,
    guide,
    lay_around,
)
from imagegen.generation.decode.team import meet, share


class Weights(NamedTuple):
    """A model, prepared; float32 where nothing else is said.

    `mix` has a group of outputs for each head, `rates`, `mix_norm` and `convolution` are those of
    `mixers.Mixer`; `angles` are the cosines and sines of the positions.
    """

    embedding: EmbeddingTables
    condition: Float32[np.ndarray, "condition areas e"]
    area: Int64[np.ndarray, " n"]
    prediction: PredictionTables
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
    components: int  # logistics of the mixture; or levels
    logits: int  # numbers of the distribution before the means: more where it has a softmax too
    levels: int
    residual_unit: float
    choice_temperature: float
    scale_temperature: float
    top_p: float
    guidance: float  # not 1 for a categorical head alone


class Rows(NamedTuple):
    """What goes through the layers together, and memory to work with, shared by a team.

    Attributes:
        s, z, keys, recent: states of all layers, changed; see `mixers.States`.
        ones: decays of mechanisms that have none.
        order: of the steps.
        sequence: levels; those that are drawn are written. With guidance, half as many rows: of
            those with their labels, which are followed by the same ones without.
        label: the row of `Weights.condition` that is added to the embedding.
        noise: uniform numbers of the steps from the first one drawn.
        predicted: the linear prediction of the step's values; without columns if there is none.
        x: what runs through the layers.
        before: inputs of the layers, normalised.
        given, mixed: what the heads are given and return.
        hidden: of the feed-forward layer.
        y: what is added to x.
        choices, work: of each member of the team, to work with; see `work_size`.
        whole, steps: rows as whole numbers; see `matrix.round_rows`.
        parameters: of the distribution of the step; at the end, of the last one.
        trace: those of all steps of a call that draws nothing; without steps where nobody asks.
        product: the address of what makes products of `BF16`, for a team of one; see
            `bf16.Products`.
    """

    s: Float32[np.ndarray, "l r h d m"]
    z: Float32[np.ndarray, "l r h d"]
    keys: Float32[np.ndarray, "l r h d n"]
    recent: Float32[np.ndarray, "l r w h c"]
    ones: Float32[np.ndarray, " d"]
    order: Order
    sequence: UInt8[np.ndarray, "images n s"]
    label: Int64[np.ndarray, " r"]
    noise: Float64[np.ndarray, "images n u"]
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
    trace: Float32[np.ndarray, "r n p"]
    product: int = 0


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


class Shares(NamedTuple):
    """What one member of a team does: each a first one and the one after the last."""

    rows: tuple[int, int]
    heads: tuple[int, int]
    mix: tuple[int, int]  # this and the following: panels of the outputs
    out: tuple[int, int]
    up: tuple[int, int]
    down: tuple[int, int]
    head: tuple[int, int]


@no_type_check
@inline()
def _shares(w, rows, member, members):
    """The shares of a member; those of `mix` are the panels of its heads."""
    heads = share(rows.s.shape[2], member, members)
    panels = w.mix.bias.shape[1] // rows.s.shape[2] // PANEL
    return Shares(
        share(rows.x.shape[0], member, members),
        heads,
        (heads[0] * panels, heads[1] * panels),
        share(w.out.bias.shape[1] // PANEL, member, members),
        share(w.up.bias.shape[1] // PANEL, member, members),
        share(w.down.bias.shape[1] // PANEL, member, members),
        share(w.head.bias.shape[1] // PANEL, member, members),
    )


@no_type_check
@inline()
def _product(x, features, matrix, layer, rows, own, panels, out, flags, members):
    """out = matrix x: a member rounds its rows `own`, and makes its panels of all rows."""
    round_rows(x, features, matrix.bits, rows.whole, rows.steps, own[0], own[1])
    meet(flags, members)
    first, stop = panels
    multiply(x, rows.whole, rows.steps, matrix, layer, first, stop, out, rows.product)


@no_type_check
@inline()
def _add_attention(w, settings, rows, shares, layer, position, flags, member, members):
    """x += attention(norm(x)), or x += attention(x) where norms come last."""
    x, before, mixed = rows.x, rows.before, rows.mixed
    norm, (first, stop) = w.norms[layer, 0], shares.rows
    if settings.norm_first:
        normalize(x, norm[0], norm[1], settings.norm_eps, settings.centred, before, first, stop)
    else:
        copy(x, before, first, stop)
    own = shares.rows
    _product(before, x.shape[1], w.mix, layer, rows, own, shares.mix, rows.given, flags, members)
    heads = shares.heads
    _mix(settings.mix, w, rows, layer, position, rows.work[member], heads[0], heads[1])
    meet(flags, members)
    _product(mixed, mixed.shape[1], w.out, layer, rows, own, shares.out, rows.y, flags, members)
    meet(flags, members)
    add_scaled(x, rows.y, w.scales[layer, 0], first, stop)
    if not settings.norm_first:
        normalize(x, norm[0], norm[1], settings.norm_eps, settings.centred, x, first, stop)


@no_type_check
@inline()
def _add_feed_forward(w, settings, rows, shares, layer, flags, members):
    """x += feed_forward(norm(x)), or x += feed_forward(x) where norms come last."""
    x, before, hidden, features = rows.x, rows.before, rows.hidden, settings.features
    norm, own = w.norms[layer, 1], shares.rows
    eps, centred, (first, stop) = settings.norm_eps, settings.centred, shares.rows
    if settings.norm_first:
        normalize(x, norm[0], norm[1], eps, centred, before, first, stop)
    else:
        copy(x, before, first, stop)
    _product(before, x.shape[1], w.up, layer, rows, own, shares.up, hidden, flags, members)
    meet(flags, members)
    activate(hidden, features, settings.gated, settings.activation, first, stop)
    _product(hidden, features, w.down, layer, rows, own, shares.down, rows.y, flags, members)
    meet(flags, members)
    add_scaled(x, rows.y, w.scales[layer, 1], first, stop)
    if not settings.norm_first:
        normalize(x, norm[0], norm[1], eps, centred, x, first, stop)


@no_type_check
@inline()
def _distribution(w, settings, rows, shares, position, flags, members):
    """The parameters of a step from what has run through the layers, and the linear prediction."""
    x, before, own, predicted = rows.x, rows.before, shares.rows, rows.predicted
    first, stop = own
    eps, centred, norm = settings.norm_eps, settings.centred, w.last_norm
    normalize(x, norm[0], norm[1], eps, centred, before, first, stop)
    _product(before, x.shape[1], w.head, 0, rows, own, shares.head, rows.parameters, flags, members)
    meet(flags, members)
    if predicted.shape[1] > 0:
        order, tables = rows.order, w.embedding
        predict(rows.sequence, position, order, tables, w.prediction, predicted, first, stop)
        components, logits, unit = settings.components, settings.logits, settings.residual_unit
        lay_around(rows.parameters, predicted, components, logits, unit, first, stop)


@no_type_check
@inline()
def _draw(settings, rows, position, uniforms, choices, flags, member, members):
    """The values of a step, from its distribution, into `rows.sequence`."""
    parameters, values = rows.parameters, rows.sequence[:, position]
    first, stop = share(values.shape[0], member, members)
    choice, scale, top_p = settings.choice_temperature, settings.scale_temperature, settings.top_p
    if settings.mixture:
        k, logits, levels = settings.components, settings.logits, settings.levels
        mixture = (choice, scale, top_p, k, logits, levels)
        draw_mixture(parameters, uniforms, mixture, choices, values, first, stop)
    else:
        if settings.guidance != 1.0:
            guide(parameters, values.shape[0], settings.guidance, first, stop)
        draw_categorical(parameters, uniforms, choice, top_p, choices, values, first, stop)
        if settings.guidance != 1.0:
            meet(flags, members)  # rows without labels are those of other members


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
    shares = _shares(w, rows, member, members)
    own_first, own_stop = shares.rows
    for position in range(start, stop):
        if position > start or not known:
            embed(
                rows.sequence,
                position,
                rows.order,
                w.embedding,
                w.condition,
                w.area,
                rows.label,
                rows.x,
                own_first,
                own_stop,
            )
            for layer in range(w.norms.shape[0]):
                _add_attention(w, settings, rows, shares, layer, position, flags, member, members)
                _add_feed_forward(w, settings, rows, shares, layer, flags, members)
            _distribution(w, settings, rows, shares, position, flags, members)
        if draws:
            uniforms = rows.noise[:, position - first]
            choices = rows.choices[member]
            _draw(settings, rows, position, uniforms, choices, flags, member, members)
        elif rows.trace.shape[1] > 0:
            copy(rows.parameters, rows.trace[:, position - start], own_first, own_stop)
    # A later call begins with the same shares, so that nobody has to be waited for here.
