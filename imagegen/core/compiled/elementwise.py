"""Norms, activations and feature maps, for a few rows at a time; each row is computed by itself.

Axes: `r` row, `e` feature.
"""

from __future__ import annotations

from typing import Any, no_type_check

import numpy as np
from llvmlite import ir
from numba import float32, int32, types
from numba.extending import intrinsic

from imagegen.core.compiled.compile import compiled, fast, inline

RELU, GELU, SILU, ELU = 0, 1, 2, 3
ACTIVATIONS = {"relu": RELU, "gelu": GELU, "silu": SILU}
FEATURE_MAPS = {"relu": RELU, "elu": ELU}
"""Of linear attention; ELU is elu(x) + 1."""
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)


@no_type_check
@intrinsic
def as_float(typingctx: Any, bits: Any) -> Any:
    """The float32 that has these 32 bits."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@no_type_check
@intrinsic
def as_int(typingctx: Any, number: Any) -> Any:
    """The 32 bits of a float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@no_type_check
@inline()
def exp32(x):
    """exp(x) to within 2 units in the last place, in operations that vectorise.

    x = n ln 2 + r, exp(x) = 2^n exp(r), where |r| <= ln(2) / 2 and exp(r) is its Taylor polynomial;
    below -87 the result is that of -87, 1.6e-38, and above 88 that of 88.
    """
    x = min(max(x, float32(-87.0)), float32(88.0))
    n = np.floor(x * LOG2_E + float32(0.5))
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = float32(1.0 / 5040.0)
    p = p * r + float32(1.0 / 720.0)
    p = p * r + float32(1.0 / 120.0)
    p = p * r + float32(1.0 / 24.0)
    p = p * r + float32(1.0 / 6.0)
    p = p * r + float32(0.5)
    p = p * r + float32(1.0)
    p = p * r + float32(1.0)
    return p * as_float((int32(n) + int32(127)) << int32(23))


@no_type_check
@inline()
def softplus32(x):
    """log(1 + exp(x)), in operations that vectorise; relative error below 1e-6.

    With w = 1 + exp(x) = 2^n m, m around 1: log w = n ln 2 + 2 artanh((m - 1) / (m + 1)). What w
    loses of a small exp(x) by rounding comes back as the factor exp(x) / (w - 1).
    """
    u = exp32(min(x, float32(60.0)))
    w = float32(1.0) + u
    bits = as_int(w) - int32(0x3F3504F3)  # of sqrt(1/2)
    n = bits >> int32(23)
    m = as_float((bits & int32(0x007FFFFF)) + int32(0x3F3504F3))
    f = (m - float32(1.0)) / (m + float32(1.0))
    g = f * f
    p = float32(2.0 / 9.0)
    p = p * g + float32(2.0 / 7.0)
    p = p * g + float32(2.0 / 5.0)
    p = p * g + float32(2.0 / 3.0)
    p = p * g + float32(2.0)
    log_w = float32(n) * LN2_HIGH + (float32(n) * LN2_LOW + p * f)
    rest = w - float32(1.0)
    small = u if rest == float32(0.0) else log_w * (u / rest)
    return x if x > float32(60.0) else small


@no_type_check
@fast()
def silu_(x):
    """x = x sigmoid(x), in place."""
    for i in range(x.shape[0]):
        x[i] = x[i] / (float32(1.0) + exp32(-x[i]))


@no_type_check
@inline()
def gelu32(x):
    """x Phi(x), with erf to within 1.5e-7 (Abramowitz and Stegun, 1964, 7.1.26)."""
    z = abs(x) * float32(0.7071067811865476)
    t = float32(1.0) / (float32(1.0) + float32(0.3275911) * z)
    p = float32(1.061405429)
    p = p * t + float32(-1.453152027)
    p = p * t + float32(1.421413741)
    p = p * t + float32(-0.284496736)
    p = p * t + float32(0.254829592)
    tail = float32(0.5) * p * t * exp32(-z * z)
    return x * (float32(1.0) - tail if x > 0 else tail)


@no_type_check
@inline()
def feature32(x, kind):
    """phi(x) with a map of `FEATURE_MAPS`; nan stays nan."""
    mapped = max(x, float32(0.0))
    if kind == ELU:
        mapped += exp32(min(x, float32(0.0)))
    return mapped if x == x else x


@no_type_check
@fast()
def accumulated(z, k, q):
    """z += k; the sum of q z."""
    total = float32(0.0)
    for i in range(z.shape[0]):
        z[i] += k[i]
        total += q[i] * z[i]
    return total


@no_type_check
@fast()
def activate(x, features, gated, kind, first, stop):
    """x = activation(x) for the first features of the rows from `first` to `stop` - 1.

    Where it is gated, they are then multiplied by as many features that follow.
    """
    for r in range(first, stop):
        row = x[r]
        if kind == RELU:
            for e in range(features):
                row[e] = max(row[e], float32(0.0))
        elif kind == GELU:
            for e in range(features):
                row[e] = gelu32(row[e])
        else:
            silu_(row[:features])
        if gated:
            for e in range(features):
                row[e] *= row[features + e]


@no_type_check
@fast()
def copy(x, out, first, stop):
    """out = x for some rows of the same width."""
    for r in range(first, stop):
        for e in range(x.shape[1]):
            out[r, e] = x[r, e]


@no_type_check
@fast()
def _moments(x, features, centred):
    """Mean, 0 where not `centred`, and mean square distance from it, of the first features."""
    mean = float32(0.0)
    if centred:
        for e in range(features):
            mean += x[e]
        mean /= float32(features)
    square = float32(0.0)
    for e in range(features):
        difference = x[e] - mean
        square += difference * difference
    return mean, square / float32(features)


@no_type_check
@compiled()
def normalize_row(x, features, weight, bias, eps, centred, out):
    """LayerNorm, or RMSNorm where not `centred`, of the first features; `out` may be x.

    Not with `FAST`, under which the result depends on whether it is.
    """
    mean, square = _moments(x, features, centred)
    factor = float32(1.0) / np.sqrt(square + eps)
    for e in range(features):
        out[e] = (x[e] - mean) * factor * weight[e] + bias[e]


@no_type_check
@compiled()
def normalize(x, weight, bias, eps, centred, out, first, stop):
    """`normalize_row` for the rows from `first` to `stop` - 1."""
    for r in range(first, stop):
        normalize_row(x[r], weight.shape[0], weight, bias, eps, centred, out[r])


@no_type_check
@fast()
def add_scaled(x, y, scale, first, stop):
    """x += y * scale for some rows; y may be wider."""
    for r in range(first, stop):
        row, added = x[r], y[r]
        for e in range(scale.shape[0]):
            row[e] += added[e] * scale[e]
