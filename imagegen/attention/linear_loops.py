"""Linear attention position by position, compiled: the loops of `linear_scan`.

A head's state stays in the first cache, and a position costs 2 d m multiply-adds however long the
sequence is, a third of what chunks of 64 cost.

Axes: `b` image, `n` position, `h` head, `d` feature of a query or key, `m` of a value, as many.

Stored numbers are float32, or bfloat16 as uint16: the first half of the bits of a float32.
"""

from __future__ import annotations

from typing import no_type_check

from numba import float32, int32, uint16, uint32
from numba.extending import overload

from imagegen.core.compiled.compile import compiled, fast
from imagegen.core.compiled.elementwise import ELU, accumulated, as_float, as_int, feature32
from imagegen.core.compiled.state import add_and_read


@no_type_check
def _widened(x):
    """A stored number as float32."""


@no_type_check
@overload(_widened)
def _widened_of(x):
    if x == uint16:
        return lambda x: as_float(int32(uint32(x) << uint32(16)))
    return lambda x: x


@no_type_check
def _narrowed(x, like):
    """A float32 as it is stored among numbers such as `like`."""


@no_type_check
@overload(_narrowed)
def _narrowed_of(x, like):
    if like != uint16:
        return lambda x, like: x

    def to_bfloat16(x, like):
        bits = uint32(as_int(x))
        # To the nearest, of two equally near ones to the even one; nan stays nan.
        rounded = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
        return uint16(rounded) if x == x else uint16(0x7FC0)

    return to_bfloat16


@no_type_check
@fast()
def _take(stored, x):
    for i in range(x.shape[0]):
        x[i] = _widened(stored[i])


@no_type_check
@fast()
def _put(x, stored):
    for i in range(x.shape[0]):
        stored[i] = _narrowed(x[i], stored[i])


@no_type_check
@fast()
def _take_mapped(stored, feature_map, x):
    """x = phi(stored)."""
    for i in range(x.shape[0]):
        x[i] = feature32(_widened(stored[i]), feature_map)


@no_type_check
@fast()
def _put_through_map(gradient, x, feature_map, stored):
    """stored = gradient phi'(.), where x = phi(.)."""
    if feature_map == ELU:
        for i in range(x.shape[0]):
            stored[i] = _narrowed(gradient[i] * min(x[i], float32(1.0)), stored[i])
    else:
        for i in range(x.shape[0]):
            kept = gradient[i] if x[i] != float32(0.0) else float32(0.0)
            stored[i] = _narrowed(kept, stored[i])


@no_type_check
@fast()
def _scaled(stored, factor, x):
    for i in range(x.shape[0]):
        x[i] = _widened(stored[i]) * factor


@no_type_check
@fast()
def _put_scaled(x, factor, stored):
    for i in range(x.shape[0]):
        stored[i] = _narrowed(x[i] * factor, stored[i])


@no_type_check
@fast()
def _dot(x, y):
    total = float32(0.0)
    for i in range(x.shape[0]):
        total += x[i] * y[i]
    return total


@no_type_check
@fast()
def _add_scaled(x, y, factor):
    for i in range(x.shape[0]):
        x[i] += y[i] * factor


@no_type_check
@compiled()
def forward(first, stop, qkv, s, z, eps, feature_map, work, y, normalizer):
    """S += phi(k) v^T, z += phi(k), y = S^T phi(q) / (phi(q)^T z + eps), at every position.

    Args:
        first, stop: the heads to go through, counted over all images.
        qkv: "b n three h d", stored numbers.
        s, z: float32 "b h d m" and "b h d", changed.
        eps: float32.
        feature_map: of `elementwise.FEATURE_MAPS`.
        work: float32 "4 d".
        y: "b n h m", stored numbers, written.
        normalizer: float32 "b h n", written: phi(q)^T z.
    """
    length, heads = qkv.shape[1], qkv.shape[3]
    q, k, v, out = work[0], work[1], work[2], work[3]
    for b in range(first // heads, -(-stop // heads)):
        own = range(max(first - b * heads, 0), min(stop - b * heads, heads))
        for n in range(length):
            for h in own:
                _take_mapped(qkv[b, n, 0, h], feature_map, q)
                _take_mapped(qkv[b, n, 1, h], feature_map, k)
                _take(qkv[b, n, 2, h], v)
                total = accumulated(z[b, h], k, q)
                normalizer[b, h, n] = total
                add_and_read(s[b, h], k, v, q, out)
                _put_scaled(out, float32(1.0) / (total + eps), y[b, n, h])


@no_type_check
@compiled()
def backward(
    first, stop, qkv, s, z, ds, ds_turned, dz, eps, feature_map, normalizer, dy, work, dbottom, dqkv
):
    """The gradients of `forward`'s inputs, of that of y = top / bottom and of the last S and z.

    The gradient of t is called dt. With dtop = dy / bottom and dbottom = -y^T dtop, where y^T dy is
    phi(q)^T (S dtop), the gradients are, of phi(q): S dtop + z dbottom; of phi(k): dS v + dz; of v:
    dS^T phi(k), with dS and dz summed from the last position on.

    Args:
        s: "b h m d", S before the first position, the other way round; changed.
        z: "b h d", z before the first position; changed.
        ds, ds_turned: "b h d m" and "b h m d", of S after the last position, both ways round;
            changed into that of S before the first one.
        dz: likewise "b h d".
        normalizer: of `forward`.
        dy: "b n h m", stored numbers.
        work: float32 "5 d".
        dbottom: float32 "b h n", written.
        dqkv: "b n three h d", stored numbers, written.
    """
    length, heads = qkv.shape[1], qkv.shape[3]
    q, k, v, dtop, out = work[0], work[1], work[2], work[3], work[4]
    for b in range(first // heads, -(-stop // heads)):
        own = range(max(first - b * heads, 0), min(stop - b * heads, heads))
        for n in range(length):
            for h in own:
                _take_mapped(qkv[b, n, 0, h], feature_map, q)
                _take_mapped(qkv[b, n, 1, h], feature_map, k)
                _take(qkv[b, n, 2, h], v)
                inverse = float32(1.0) / (normalizer[b, h, n] + eps)
                _scaled(dy[b, n, h], inverse, dtop)
                _add_scaled(z[b, h], k, float32(1.0))
                add_and_read(s[b, h], v, k, dtop, out)
                d = -_dot(q, out) * inverse
                dbottom[b, h, n] = d
                _add_scaled(out, z[b, h], d)
                _put_through_map(out, q, feature_map, dqkv[b, n, 0, h])
        for n in range(length - 1, -1, -1):
            for h in own:
                _take_mapped(qkv[b, n, 0, h], feature_map, q)
                _take_mapped(qkv[b, n, 1, h], feature_map, k)
                _take(qkv[b, n, 2, h], v)
                _scaled(dy[b, n, h], float32(1.0) / (normalizer[b, h, n] + eps), dtop)
                _add_scaled(dz[b, h], q, dbottom[b, h, n])
                add_and_read(ds[b, h], q, dtop, k, out)
                _put(out, dqkv[b, n, 2, h])
                add_and_read(ds_turned[b, h], dtop, q, v, out)
                _add_scaled(out, dz[b, h], float32(1.0))
                _put_through_map(out, k, feature_map, dqkv[b, n, 1, h])
