"""One position of an attention mechanism: update the state, read it, normalise.

Axes: `r` row, `h` head, `g` number of what a head is given (see `mixers`), `d` query/key feature,
`m` value feature, `n` position.
"""

from __future__ import annotations

import math
from typing import no_type_check

import numpy as np
from numba import float32

from imagegen.attention.delta import L2_EPS
from imagegen.core.compiled.compile import compiled, fast
from imagegen.core.compiled.elementwise import (
    accumulated,
    exp32,
    feature32,
    normalize_row,
    silu_,
    softplus32,
)
from imagegen.core.compiled.state import read, update_and_read
from imagegen.core.compiled.vectors import LANES
from imagegen.generation.decode.mixers import (
    FIXED,
    LAYER_NORM,
    LOG_SIGMOID,
    NO_DECAY,
    NO_GATE,
    NO_NORM,
    SILU,
)


def work_size(d: int, m: int, length: int) -> int:
    """Numbers that one position of any mechanism needs to work with."""
    return max(2 * d + m, length + LANES)


@no_type_check
@fast()
def _map(x, feature_map):
    for i in range(x.shape[0]):
        x[i] = feature32(x[i], feature_map)


@no_type_check
@fast()
def _scale(x, factor):
    for i in range(x.shape[0]):
        x[i] *= factor


@no_type_check
@compiled()
def linear_attention(given, s, z, ones, mix, first, stop, y):
    """S += phi(k) v^T, z += phi(k), y = phi(q)^T S / (phi(q)^T z + eps), for maps d -> d.

    Args:
        given: "r (h g)"; changed.
        s, z: "r h d m" and "r h d", changed.
        ones: "d".
        mix: see `MixSettings`.
        first, stop: the heads to go through.
        y: "r (h m)", written.
    """
    rows, heads, d, m = s.shape
    group, eps = given.shape[1] // heads, float32(mix.eps)
    for r in range(rows):
        for h in range(first, stop):
            head = given[r, h * group : (h + 1) * group]
            _map(head[: 2 * d], mix.feature_map)
            q, k, v = head[:d], head[d : 2 * d], head[2 * d : 2 * d + m]
            out = y[r, h * m : (h + 1) * m]
            normalizer = accumulated(z[r, h], k, q)
            update_and_read(s[r, h], ones, k, v, q, out)
            _scale(out, float32(1.0) / (normalizer + eps))


@no_type_check
@fast()
def _exponentials(scores):
    """scores = exp(scores - largest); their sum."""
    largest = scores[0]
    for i in range(scores.shape[0]):
        largest = max(largest, scores[i])
    total = float32(0.0)
    for i in range(scores.shape[0]):
        scores[i] = exp32(scores[i] - largest)
        total += scores[i]
    return total


@no_type_check
@compiled()
def softmax_attention(given, values, keys, position, work, first, stop, y):
    """y = sum_j softmax(q k_j) v_j over the positions so far; the scale is in the queries.

    Args:
        given: "r (h g)".
        values, keys: "r h n m" and "r h d n", known before `position`; its own are written.
        position: of the queries.
        work: to work with; see `work_size`.
        first, stop: the heads to go through.
        y: "r (h m)", written.
    """
    rows, heads, d, _ = keys.shape
    group, m, length = given.shape[1] // heads, values.shape[3], position + 1
    padded = (length + LANES - 1) // LANES * LANES
    scores = work[:padded]
    for r in range(rows):
        for h in range(first, stop):
            head = given[r, h * group : (h + 1) * group]
            for i in range(d):
                keys[r, h, i, position] = head[d + i]
            value = values[r, h, position]
            for j in range(m):
                value[j] = head[2 * d + j]
            out = y[r, h * m : (h + 1) * m]
            read(keys[r, h, :, :padded], head[:d], scores)
            total = _exponentials(scores[:length])
            read(values[r, h, :length], scores, out)
            _scale(out, float32(1.0) / total)


@no_type_check
@fast()
def _convolve(x, recent, weight):
    """x = silu(sum_j weight_j x_(t+1-size+j)) in place; `recent` moves on. "c", "w-1 c", "w c"."""
    before = recent.shape[0]
    for c in range(x.shape[0]):
        total = weight[before, c] * x[c]
        for j in range(before):
            total += weight[j, c] * recent[j, c]
        for j in range(before - 1):
            recent[j, c] = recent[j + 1, c]
        if before > 0:
            recent[before - 1, c] = x[c]
        x[c] = total


@no_type_check
@fast()
def _to_unit(x):
    """x = x / |x|."""
    square = float32(0.0)
    for i in range(x.shape[0]):
        square += x[i] * x[i]
    factor = float32(1.0) / np.sqrt(square + float32(L2_EPS))
    for i in range(x.shape[0]):
        x[i] *= factor


@no_type_check
@fast()
def _rotate(x, angle):
    """Each two neighbouring features, a complex number, times "d/2 (cos, sin)"."""
    for i in range(x.shape[0] // 2):
        real, imaginary = x[2 * i], x[2 * i + 1]
        cos, sin = angle[i, 0], angle[i, 1]
        x[2 * i] = real * cos - imaginary * sin
        x[2 * i + 1] = real * sin + imaginary * cos


@no_type_check
@compiled()
def _decays(raw, rate, kind, decay):
    """The decays of all features from the numbers of the group; see `MixSettings`.

    Not with `FAST`, under which `softplus32` would lose what it takes back of a rounding.
    """
    if kind == NO_DECAY:
        for i in range(decay.shape[0]):
            decay[i] = float32(1.0)
    elif kind == FIXED:
        for i in range(decay.shape[0]):
            decay[i] = exp32(-rate)
    else:
        sign = float32(-1.0) if kind == LOG_SIGMOID else float32(1.0)
        for i in range(raw.shape[0]):
            decay[i] = exp32(-rate * softplus32(sign * raw[i]))
        if raw.shape[0] == 1:
            for i in range(1, decay.shape[0]):
                decay[i] = decay[0]


@no_type_check
@fast()
def _write(v, found, beta):
    """v = beta (v - found)."""
    for j in range(v.shape[0]):
        v[j] = beta * (v[j] - found[j])


@no_type_check
@fast()
def _times(x, y, out):
    for i in range(x.shape[0]):
        out[i] = x[i] * y[i]


@no_type_check
@fast()
def _gate(x, gate, kind):
    """x = x sigmoid(gate), times the gate for SILU."""
    for j in range(x.shape[0]):
        factor = float32(1.0) / (float32(1.0) + exp32(-gate[j]))
        if kind == SILU:
            factor *= gate[j]
        x[j] *= factor


@no_type_check
@compiled()
def decayed_attention(given, s, recent, mix, rates, norm, convolution, angle, work, first, stop, y):
    """S = diag(decay) S, corrected by the delta rule where there is one, + k v^T; y = S^T q.

    Args:
        given: "r (h g)"; changed.
        s, recent: "r h d m" and "r w-1 h c", changed.
        mix: see `MixSettings`.
        rates, norm, convolution: of the layer; see `Mixer`.
        angle: cosines and sines of the position "d/2 2".
        work: to work with; see `work_size`.
        first, stop: the heads to go through.
        y: "r (h m)", written.
    """
    rows, heads, d, m = s.shape
    group, eps = given.shape[1] // heads, float32(mix.eps)
    channels, decay_at = 2 * d + m, 2 * d + m
    beta_at = decay_at + mix.decays
    gate_at = beta_at + (1 if mix.delta else 0)
    decay, kept, found = work[:d], work[d : 2 * d], work[2 * d : 2 * d + m]
    for r in range(rows):
        for h in range(first, stop):
            head = given[r, h * group : (h + 1) * group]
            q, k, v = head[:d], head[d : 2 * d], head[2 * d : 2 * d + m]
            out = y[r, h * m : (h + 1) * m]
            if convolution.shape[0] > 0:
                _convolve(head[:channels], recent[r, :, h], convolution[:, h])
            if mix.delta:
                silu_(head[:channels])
                _to_unit(q)
                _to_unit(k)
            if mix.rotary:
                _rotate(q, angle)
                _rotate(k, angle)
            _decays(head[decay_at:beta_at], rates[h], mix.decay, decay)
            if mix.delta:
                _times(decay, k, kept)
                read(s[r, h], kept, found)
                beta = float32(1.0 / (1.0 + math.exp(-float(head[beta_at]))))
                _write(v, found, beta)
            update_and_read(s[r, h], decay, k, v, q, out)
            if mix.norm != NO_NORM:
                centred = mix.norm == LAYER_NORM
                normalize_row(out, mix.true_m, norm[0], norm[1], eps, centred, out)
            if mix.gate != NO_GATE:
                _gate(out, head[gate_at : gate_at + m], mix.gate)
