"""One pass over the state of a head, in vectors: decay, update and read, or read alone.

Axes: `d` query/key feature, `m` value feature.
"""

from __future__ import annotations

from typing import Any, no_type_check

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from imagegen.decode.compile import compiled
from imagegen.decode.matmul import prefetch

LANES = 8
FLOAT = 4  # bytes


def _pass(vectors: int, updates: bool) -> Any:
    """A pass over `vectors` times 8 columns of a state; all by address, the stride in numbers."""

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
    ) -> Any:
        at, count = types.uintp, types.intp
        signature = types.void(at, count, at, at, at, at, at, count)
        return signature, lambda context, builder, sig, args: _emit(
            context, builder, args, vectors, updates
        )

    return state_pass


def _emit(context: Any, builder: Any, args: Any, vectors: int, updates: bool) -> Any:
    state, stride, decay, k, q, v, out, d = args
    scalar, lane = ir.FloatType(), ir.IntType(32)
    vector = ir.VectorType(scalar, LANES)
    columns = range(vectors)
    fma_type = ir.FunctionType(vector, [vector] * 3)
    fma = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{LANES}f32")
    everywhere = ir.Constant(ir.VectorType(lane, LANES), [0] * LANES)

    def pointer(address: Any, j: int) -> Any:
        moved = builder.add(address, ir.Constant(address.type, j * LANES * FLOAT))
        return builder.inttoptr(moved, ir.PointerType(vector))

    def spread(address: Any, index: Any) -> Any:
        at = builder.add(address, builder.mul(index, ir.Constant(index.type, FLOAT)))
        value = builder.load(builder.inttoptr(at, ir.PointerType(scalar)), align=FLOAT)
        empty = ir.Constant(vector, ir.Undefined)
        one = builder.insert_element(empty, value, ir.Constant(lane, 0))
        return builder.shuffle_vector(one, empty, everywhere)

    zero = ir.Constant(vector, [0.0] * LANES)
    sums = [cgutils.alloca_once(builder, vector) for _ in columns]
    for total in sums:
        builder.store(zero, total)
    values = [builder.load(pointer(v, j), align=FLOAT) for j in columns] if updates else []
    with cgutils.for_range(builder, d) as loop:
        four = ir.Constant(stride.type, FLOAT)
        row = builder.add(state, builder.mul(loop.index, builder.mul(stride, four)))
        query = spread(q, loop.index)
        if updates:
            kept, key = spread(decay, loop.index), spread(k, loop.index)
        if updates:
            # Each head may lie in a page of its own, and processors do not look beyond a page.
            following = builder.add(row, builder.mul(d, builder.mul(stride, four)))
            for j in range(0, vectors, 2):
                ahead = builder.add(following, ir.Constant(row.type, j * LANES * FLOAT))
                prefetch(builder, ahead)
        for j in columns:
            now = builder.load(pointer(row, j), align=FLOAT)
            if updates:
                now = builder.call(fma, [key, values[j], builder.fmul(kept, now)])
                builder.store(now, pointer(row, j), align=FLOAT)
            builder.store(builder.call(fma, [query, now, builder.load(sums[j])]), sums[j])
    for j in columns:
        builder.store(builder.load(sums[j]), pointer(out, j), align=FLOAT)
    return context.get_dummy_value()


_update4, _update1 = _pass(4, True), _pass(1, True)
_read4, _read1 = _pass(4, False), _pass(1, False)


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
    stride = state.strides[0] // FLOAT
    at, decay_at, k_at, q_at = (
        state.ctypes.data,
        decay.ctypes.data,
        k.ctypes.data,
        q.ctypes.data,
    )
    v_at, out_at = v.ctypes.data, out.ctypes.data
    j = 0
    while j < m:
        offset = j * FLOAT
        if m - j >= 32:
            _update4(at + offset, stride, decay_at, k_at, q_at, v_at + offset, out_at + offset, d)
            j += 32
        else:
            _update1(at + offset, stride, decay_at, k_at, q_at, v_at + offset, out_at + offset, d)
            j += 8


@no_type_check
@compiled()
def read(state, q, out):
    """out = S^T q; see `update_and_read`."""
    d, m = state.shape
    stride = state.strides[0] // FLOAT
    at, q_at, out_at = state.ctypes.data, q.ctypes.data, out.ctypes.data
    j = 0
    while j < m:
        offset = j * FLOAT
        if m - j >= 32:
            _read4(at + offset, stride, q_at, q_at, q_at, q_at, out_at + offset, d)
            j += 32
        else:
            _read1(at + offset, stride, q_at, q_at, q_at, q_at, out_at + offset, d)
            j += 8
