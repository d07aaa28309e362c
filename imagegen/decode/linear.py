"""Generation with linear attention in one compiled loop: no Python between two pixels.

Axes: `l` layer, `r` row, `n` position, `s` value a step, `u` uniform number, `e` model width, `f`
feed-forward feature, `t i p` packed weights (see `matmul`).
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Bool, Float32, Int64
from numba import njit

from imagegen.decode.attention import linear_attention
from imagegen.decode.elementwise import activate, activate_gated, add_scaled, normalize
from imagegen.decode.embedding import embed
from imagegen.decode.matmul import linear
from imagegen.decode.sampling import draw_categorical, draw_mixture


class Weights(NamedTuple):
    """A model of linear attention, prepared; float32 where nothing else is said."""

    lags: Int64[np.ndarray, "k"]
    inside: Bool[np.ndarray, "n k"]
    table: Float32[np.ndarray, "k s v e"]
    place: Float32[np.ndarray, "n e"]
    qkv: Float32[np.ndarray, "l t i p"]
    qkv_bias: Float32[np.ndarray, "l o"]
    out: Float32[np.ndarray, "l t i p"]
    out_bias: Float32[np.ndarray, "l o"]
    up: Float32[np.ndarray, "l t i p"]
    up_bias: Float32[np.ndarray, "l o"]
    down: Float32[np.ndarray, "l t i p"]
    down_bias: Float32[np.ndarray, "l o"]
    norms: Float32[np.ndarray, "l two weight_bias e"]
    last_norm: Float32[np.ndarray, "weight_bias e"]
    scales: Float32[np.ndarray, "l two e"]
    head: Float32[np.ndarray, "t i p"]
    head_bias: Float32[np.ndarray, "o"]


class Settings(NamedTuple):
    """What else the loop has to know of a model and of how to draw."""

    features: int  # of the feed-forward layer
    norm_first: bool
    centred: bool  # LayerNorm, not RMSNorm
    norm_eps: np.float32
    activation: int
    gated: bool
    feature_map: int
    eps: np.float32
    mixture: bool  # or categorical
    components: int  # of the mixture; or levels
    levels: int
    choice_temperature: float
    scale_temperature: float


@no_type_check
@njit(cache=True, nogil=True, error_model="numpy")
def parameters_at(w, settings, s, z, sequence, position, context, x, y, wide, parameters):
    """The distribution of one step, into `parameters`; changes the states s and z.

    Args:
        w, settings: the model.
        s, z: states "l r h d m" and "l r h d".
        sequence: levels "r n s", known up to `position`.
        position: the step.
        context: "r e", added to the embedding.
        x, y: "r e" and "r o" to work with.
        wide: "r o" to work with, as wide as the widest layer.
        parameters: "r p", written.
    """
    embed(sequence, position, w.lags, w.inside, w.table, w.place, context, x)
    inner = s.shape[2] * s.shape[4]
    width = x.shape[1]
    for layer in range(w.qkv.shape[0]):
        norms, scales = w.norms[layer], w.scales[layer]
        before = y[:, :width]
        if settings.norm_first:
            normalize(x, norms[0, 0], norms[0, 1], settings.norm_eps, settings.centred, before)
        else:
            before[:] = x
        linear(before, w.qkv[layer], w.qkv_bias[layer], wide)
        linear_attention(wide, s[layer], z[layer], settings.feature_map, settings.eps, y[:, :inner])
        linear(y, w.out[layer], w.out_bias[layer], wide)
        add_scaled(x, wide, scales[0])
        if settings.norm_first:
            normalize(x, norms[1, 0], norms[1, 1], settings.norm_eps, settings.centred, before)
        else:
            normalize(x, norms[0, 0], norms[0, 1], settings.norm_eps, settings.centred, x)
            before[:] = x
        linear(before, w.up[layer], w.up_bias[layer], wide)
        if settings.gated:
            activate_gated(wide[:, : 2 * settings.features], settings.activation)
        else:
            activate(wide[:, : settings.features], settings.activation)
        linear(wide, w.down[layer], w.down_bias[layer], y)
        add_scaled(x, y, scales[1])
        if not settings.norm_first:
            normalize(x, norms[1, 0], norms[1, 1], settings.norm_eps, settings.centred, x)
    last = y[:, :width]
    normalize(x, w.last_norm[0], w.last_norm[1], settings.norm_eps, settings.centred, last)
    linear(last, w.head, w.head_bias, parameters)


@no_type_check
@njit(cache=True, nogil=True, error_model="numpy")
def run(w, settings, s, z, sequence, context, noise, first, start, stop, known, parameters):
    """Draw steps `start` to `stop` - 1 of each row.

    Args:
        w, settings: the model.
        s, z: states "l r h d m" and "l r h d", changed.
        sequence: levels "r n s"; those from `start` on are written.
        context: "r e", added to the embedding.
        noise: uniform numbers "r n u" of the steps from `first` on.
        first, start, stop: positions.
        known: whether `parameters` hold the distribution of step `start` already.
        parameters: "r p", the distribution of the last step when this ends.
    """
    rows, width = context.shape
    widest = max(w.qkv_bias.shape[1], w.up_bias.shape[1], w.out_bias.shape[1])
    x = np.empty((rows, width), dtype=np.float32)
    y = np.empty(
        (rows, max(w.out_bias.shape[1], w.down_bias.shape[1], s.shape[2] * s.shape[4])),
        dtype=np.float32,
    )
    wide = np.empty((rows, widest), dtype=np.float32)
    work = np.empty(settings.components, dtype=np.float64)
    for position in range(start, stop):
        if position > start or not known:
            parameters_at(w, settings, s, z, sequence, position, context, x, y, wide, parameters)
        values, uniforms = sequence[:, position], noise[:, position - first]
        if settings.mixture:
            draw_mixture(
                parameters,
                uniforms,
                settings.choice_temperature,
                settings.scale_temperature,
                settings.levels,
                work,
                values,
            )
        else:
            draw_categorical(parameters, uniforms, settings.choice_temperature, work, values)
