"""Matrix products of 16-bit whole numbers: twice as many a cycle as of float32, and half the bytes.

    y_o = s_x s_o sum_i round(x_i / s_x) round(w_oi / s_o) + b_o

with a step s_o for each output and s_x for each row, chosen when the row is known. Numbers of a
row take 13 bits, which leaves weights 11 to 14 bits before a sum of 32 bits could overflow: the
products are more exact than those of bfloat16 (8 bits) and about as exact as those of float16 (11).
The sums themselves are exact, so that they do not depend on their order.

Axes: `r` row, `i` input, `o` output, `t` panel, `p` output in a panel, `k` pair of inputs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, no_type_check

import numpy as np
from jaxtyping import Float, Float32, Int8, Int16
from llvmlite import ir
from numba import float32, int16, int32, types
from numba.core import cgutils
from numba.extending import intrinsic

from imagegen.core.compiled.compile import compiled, fast, target
from imagegen.core.compiled.elementwise import as_float
from imagegen.core.compiled.vectors import (
    FLOAT,
    load,
    moved,
    multiply_add,
    number,
    prefetch,
    scaled,
    spread,
    store,
    whole,
)
from imagegen.generation.decode.matmul import LANES, PANEL, TILE_ROWS, floats

wholes, shorts = ir.VectorType(whole, LANES), ir.VectorType(ir.IntType(16), 2 * LANES)
UNROLL = 2
"""Pairs in a turn of the innermost loop; inputs are padded to whole turns."""
LARGEST = 4095
"""Largest magnitude of a row's whole numbers."""


def is_supported() -> bool:
    """Whether the target multiplies 8 pairs of 16-bit numbers in one instruction (AVX2).

    Every target gets the same sums; only with this instruction are they known to be faster than
    products of float32.
    """
    return target().features.get("avx2", False)


def pack_integers(
    weight: Float[np.ndarray, "o i"], bits: int
) -> tuple[
    Int16[np.ndarray, "t k p two"] | Int8[np.ndarray, "t k p two"],
    Float32[np.ndarray, "o_padded"],
]:
    """The weights of a linear layer as whole numbers, in panels, and the steps of the outputs.

    Args:
        weight: finite.
        bits: 16, or 8 for half the bytes and steps of 1/127 of an output's largest weight.
    """
    outputs, inputs = weight.shape
    pairs, panels = -(-inputs // (2 * UNROLL)) * UNROLL, -(-outputs // PANEL)
    padded = np.zeros((panels * PANEL, 2 * pairs))
    padded[:outputs, :inputs] = weight
    magnitude = np.abs(padded)
    if bits == 8:
        steps = magnitude.max(axis=1) / 127
    else:
        # Rounding adds half a step for each input at most.
        room = (2**31 - 1) // LARGEST - pairs
        steps = np.maximum(magnitude.max(axis=1) / (2**15 - 1), magnitude.sum(axis=1) / room)
    steps = np.where(steps > 0, steps, 1.0).astype(np.float32)
    whole = np.rint(padded / steps[:, None]).astype(np.int8 if bits == 8 else np.int16)
    packed = whole.reshape(panels, PANEL, pairs, 2).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(packed), steps


@no_type_check
@fast()
def quantize(x, inputs, whole, steps, first, stop):
    """Round the first inputs of some rows of x to `whole`, int16, times `steps`, one for a row.

    A row with nan or inf gets the step nan.
    """
    for r in range(first, stop):
        row, rounded = x[r], whole[r]
        # As whole numbers, because the largest of floats is not found in lanes.
        bits = row.view(np.int32)
        largest_bits = int32(0)
        for i in range(inputs):
            largest_bits = max(largest_bits, bits[i] & int32(0x7FFFFFFF))
        largest = as_float(largest_bits)
        if largest_bits >= int32(0x7F800000):
            largest = float32(np.nan)
        factor = float32(0.0)
        if largest > float32(0.0):
            factor = float32(LARGEST) / largest
        steps[r] = largest / float32(LARGEST)
        for i in range(inputs):
            rounded[i] = int16(np.rint(row[i] * factor))


def _tile(rows: int, bits: int) -> Any:
    """c[r, :16] = (sum_i a[r, i] b[i, :16]) * scale[:16] * step[r] + bias[:16], all by address."""

    @no_type_check
    @intrinsic
    def tile(
        typingctx: Any,
        a: Any,
        a_stride: Any,
        steps: Any,
        b: Any,
        scale: Any,
        bias: Any,
        c: Any,
        c_stride: Any,
        n: Any,
    ) -> Any:
        address, count = types.uintp, types.intp
        inputs = (address, count, address, address, address, address, address, count, count)
        signature = types.void(*inputs)
        return signature, lambda context, builder, sig, args: _emit(
            context, builder, args, rows, bits
        )

    return tile


def _multiply_pairs(builder: Any) -> Callable[[Any, Any], Any]:
    """A function of two vectors of 16-bit numbers: a_2k b_2k + a_2k+1 b_2k+1, in 32 bits."""
    if is_supported():
        kind = ir.FunctionType(wholes, [shorts] * 2)
        name = "avx2.pmadd.wd" if LANES == 8 else "avx512.pmaddw.d.512"
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
        return lambda a, b: builder.call(function, [a, b])
    wide = ir.VectorType(whole, 2 * LANES)

    def multiply(a: Any, b: Any) -> Any:
        products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
        places = (ir.Constant(wholes, [*range(first, 2 * LANES, 2)]) for first in (0, 1))
        return builder.add(*(builder.shuffle_vector(products, products, at) for at in places))

    return multiply


def _emit(context: Any, builder: Any, args: Any, rows: int, bits: int) -> Any:
    a, a_stride, steps, b, scale, bias, c, c_stride, n = args
    stored = ir.VectorType(ir.IntType(bits), 2 * LANES)
    columns, line = range(PANEL // LANES), PANEL * 2 * bits // 8
    multiply = _multiply_pairs(builder)
    fma = multiply_add(builder, LANES)

    def row(address: Any, stride: Any, r: int) -> Any:
        return builder.add(address, scaled(builder, stride, r))

    def column(address: Any, j: int) -> Any:
        return load(builder, moved(builder, address, j * LANES * FLOAT), floats)

    # Of few rows there would be few sums, and an addition would wait for the one before.
    sets = range(UNROLL if rows <= 2 else 1)
    sums = [
        [[cgutils.alloca_once(builder, wholes) for _ in sets] for _ in columns] for _ in range(rows)
    ]
    for each in itertools.chain.from_iterable(itertools.chain.from_iterable(sums)):
        builder.store(ir.Constant(wholes, [0] * LANES), each)
    a_rows = [row(a, a_stride, r) for r in range(rows)]
    # The processor takes in little more a cycle than the products and sums themselves, so that
    # the rest of the loop is shared by several pairs.
    with cgutils.for_range(builder, builder.udiv(n, ir.Constant(n.type, UNROLL))) as loop:
        start = builder.add(b, scaled(builder, loop.index, line * UNROLL))
        offset = scaled(builder, loop.index, 4 * UNROLL)
        ahead = builder.add(start, scaled(builder, n, line))
        for u in range(UNROLL):
            if u * line % 64 == 0:
                prefetch(builder, moved(builder, ahead, u * line))
            panel = moved(builder, start, u * line)
            weights = [
                load(builder, moved(builder, panel, j * line // len(columns)), stored, bits // 8)
                for j in columns
            ]
            if bits < 16:
                weights = [builder.sext(weight, shorts) for weight in weights]
            for r in range(rows):
                place = moved(builder, builder.add(a_rows[r], offset), 4 * u)
                pair = spread(builder, load(builder, place, whole, 2), LANES)
                both = builder.bitcast(pair, shorts)
                for j in columns:
                    product = multiply(both, weights[j])
                    total = sums[r][j][u % len(sets)]
                    builder.store(builder.add(builder.load(total), product), total)
    for r in range(rows):
        step = spread(builder, load(builder, moved(builder, steps, FLOAT * r), number), LANES)
        for j in columns:
            parts = [builder.load(each) for each in sums[r][j]]
            total = builder.sitofp(functools.reduce(builder.add, parts), floats)
            total = fma(builder.fmul(total, column(scale, j)), step, column(bias, j))
            store(builder, total, moved(builder, row(c, c_stride, r), j * LANES * FLOAT))
    return context.get_dummy_value()


_wide1, _wide2, _wide_all = _tile(1, 16), _tile(2, 16), _tile(TILE_ROWS, 16)
_narrow1, _narrow2, _narrow_all = _tile(1, 8), _tile(2, 8), _tile(TILE_ROWS, 8)


@no_type_check
@compiled()
def linear_integers(whole, row_steps, bits, packed, steps, bias, first, stop, out):
    """out = x W^T + bias of quantised rows and weights.

    Args:
        whole, row_steps: int16 "r i" and float32 "r", from `quantize`.
        bits: of the weights, 16 or 8.
        packed, steps: the bytes "t w" and float32 "t * p", from `pack_integers`.
        bias: float32 "t * p".
        first, stop: the panels to go through.
        out: float32 "r t * p", or wider.
    """
    rows, panel = whole.shape[0], packed.strides[0]
    pairs = panel // (PANEL * 2 * bits // 8)
    x_stride, out_stride = whole.strides[0], out.strides[0]
    x_at, out_at, steps_at = whole.ctypes.data, out.ctypes.data, row_steps.ctypes.data
    packed_at, scale_at, bias_at = packed.ctypes.data, steps.ctypes.data, bias.ctypes.data
    for t in range(first, stop):
        b = packed_at + t * panel
        scale, start = scale_at + t * PANEL * 4, bias_at + t * PANEL * 4
        r = 0
        while r < rows:
            a, s = x_at + r * x_stride, steps_at + r * 4
            c = out_at + r * out_stride + t * PANEL * 4
            together = TILE_ROWS if rows - r >= TILE_ROWS else 2 if rows - r >= 2 else 1
            if bits == 16:
                if together == TILE_ROWS:
                    _wide_all(a, x_stride, s, b, scale, start, c, out_stride, pairs)
                elif together == 2:
                    _wide2(a, x_stride, s, b, scale, start, c, out_stride, pairs)
                else:
                    _wide1(a, x_stride, s, b, scale, start, c, out_stride, pairs)
            elif together == TILE_ROWS:
                _narrow_all(a, x_stride, s, b, scale, start, c, out_stride, pairs)
            elif together == 2:
                _narrow2(a, x_stride, s, b, scale, start, c, out_stride, pairs)
            else:
                _narrow1(a, x_stride, s, b, scale, start, c, out_stride, pairs)
            r += together
