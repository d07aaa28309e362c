"""One pass over the state of a head, in vectors: decay, update and read, or read alone.

Axes: `d` query/key feature, `m` value feature.
"""

from __future__ import annotations

from typing import Any, no_type_check

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from imagegen.core.compiled.compile import compiled
from imagegen.core.compiled.vectors import (
    FLOAT,
    LANES,
    floats,
    load,
    moved,
    multiply_add,
    number,
    prefetch,
    scaled,
    spread,
    store,
)


def _pass(updates: bool, decays: bool = False) -> Any:
    """A pass over a state; all by address, the stride in numbers."""

    @no_type_check
    @intrinsic
    def state_pass(
        typingctx: Any,
        state: Any,
        stride: Any,
        decay: Any,
        k: Any,
        q: Any,
        v: Any,
        out: Any,
        d: Any,
        m: Any,
    ) -> Any:
        at, count = types.uintp, types.intp
        signature = types.void(at, count, at, at, at, at, at, count, count)
        return signature, lambda context, builder, sig, args: _emit(
            context, builder, args, updates, decays
        )

    return state_pass


def _emit(context: Any, builder: Any, args: Any, updates: bool, decays: bool) -> Any:
    """4 vectors of columns at a time, then the others one by one."""
    state, stride, decay, k, q, v, out, d, m = args
    done = ir.Constant(m.type, 0)
    for vectors in (4, 1):
        width = vectors * LANES
        count = builder.udiv(builder.sub(m, done), ir.Constant(m.type, width))
        with cgutils.for_range(builder, count) as loop:
            offset = scaled(builder, builder.add(done, scaled(builder, loop.index, width)), FLOAT)
            moved_on = (builder.add(address, offset) for address in (state, v, out))
            _emit_columns(builder, (*moved_on, stride, decay, k, q, d), vectors, updates, decays)
        done = builder.add(done, scaled(builder, count, width))
    return context.get_dummy_value()


def _emit_columns(builder: Any, args: Any, vectors: int, updates: bool, decays: bool) -> None:
    state, v, out, stride, decay, k, q, d = args
    columns = range(vectors)
    fma = multiply_add(builder)
    bytes_a_row = scaled(builder, stride, FLOAT)

    def column(address: Any, j: int) -> Any:
        return moved(builder, address, j * LANES * FLOAT)

    def feature(address: Any, index: Any) -> Any:
        return spread(
            builder, load(builder, builder.add(address, scaled(builder, index, FLOAT)), number)
        )

    zero = ir.Constant(floats, [0.0] * LANES)
    sums = [cgutils.alloca_once(builder, floats) for _ in columns]
    for total in sums:
        builder.store(zero, total)
    values = [load(builder, column(v, j), floats) for j in columns] if updates else []
    with cgutils.for_range(builder, d) as loop:
        row = builder.add(state, builder.mul(loop.index, bytes_a_row))
        query = feature(q, loop.index)
        if updates:
            key = feature(k, loop.index)
            kept = feature(decay, loop.index) if decays else None
            # Each head may be in a page of its own, and processors do not look beyond a page.
            following = builder.add(row, builder.mul(d, bytes_a_row))
            for j in range(0, vectors, 2):
                prefetch(builder, column(following, j))
        for j in columns:
            now = load(builder, column(row, j), floats)
            if updates:
                now = now if kept is None else builder.fmul(kept, now)
                now = fma(key, values[j], now)
                store(builder, now, column(row, j))
            builder.store(fma(query, now, builder.load(sums[j])), sums[j])
    for j in columns:
        store(builder, builder.load(sums[j]), column(out, j))


_update, _add, _read = _pass(True, True), _pass(True), _pass(False)


@no_type_check
@compiled()
def update_and_read(state, decay, k, v, q, out):
    """S = diag(decay) S + k v^T, out = S^T q.

    Args:
        state: float32 "d m", its rows contiguous, changed; m is a multiple of 8.
        decay, k, q: float32 "d".
        v: float32 "m".
        out: float32 "m", written.
    """
    d, m = state.shape
    k_at, q_at, v_at, out_at = k.ctypes.data, q.ctypes.data, v.ctypes.data, out.ctypes.data
    stride = state.strides[0] // FLOAT
    _update(state.ctypes.data, stride, decay.ctypes.data, k_at, q_at, v_at, out_at, d, m)


@no_type_check
@compiled()
def add_and_read(state, k, v, q, out):
    """S += k v^T, out = S^T q; see `update_and_read`."""
    d, m = state.shape
    k_at, q_at, v_at, out_at = k.ctypes.data, q.ctypes.data, v.ctypes.data, out.ctypes.data
    _add(state.ctypes.data, state.strides[0] // FLOAT, k_at, k_at, q_at, v_at, out_at, d, m)


@no_type_check
@compiled()
def read(state, q, out):
    """out = S^T q; see `update_and_read`."""
    d, m = state.shape
    q_at = q.ctypes.data
    stride = state.strides[0] // FLOAT
    _read(state.ctypes.data, stride, q_at, q_at, q_at, q_at, out.ctypes.data, d, m)
