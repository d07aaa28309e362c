"""Matrix products for a few rows at a time, whose results do not depend on how many there are.

Libraries choose another order of summation for one row than for many, so that an image would depend
on what is drawn beside it. Here every output is summed over the inputs in order, with one
multiply-add each, whatever the number of rows. Weights are packed once into panels of 16 outputs; a
tile of 6 rows and 16 outputs stays in registers (Goto and van de Geijn, 2008; BLIS, Van Zee and van
de Geijn, 2015).

Axes: `r` row, `i` input, `o` output, `t` panel, `p` output in a panel.
"""

from __future__ import annotations

from typing import Any, no_type_check

import numpy as np
from jaxtyping import Float
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from imagegen.core.compiled.compile import compiled, target
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
)

PANEL = 16
LANES = 16 if target().features.get("avx512bw", False) else 8
"""Numbers of 32 bits in a vector: AVX-512 has instructions for those of 16-bit numbers too."""
TILE_ROWS = 8 if LANES == PANEL else 6
"""Their sums stay in registers, and no addition waits for the one before it."""
floats = ir.VectorType(number, LANES)


def pack(weight: Float[np.ndarray, "o i"]) -> Float[np.ndarray, "t i p"]:
    """The weights of a linear layer in panels, float32, padded with zeros to whole ones."""
    outputs, inputs = weight.shape
    panels = -(-outputs // PANEL)
    padded = np.zeros((panels * PANEL, inputs), dtype=np.float32)
    padded[:outputs] = weight
    return np.ascontiguousarray(padded.reshape(panels, PANEL, inputs).transpose(0, 2, 1))


def pad(bias: Float[np.ndarray, "o"]) -> Float[np.ndarray, "o_padded"]:
    """The bias, float32, padded with zeros to whole panels."""
    padded = np.zeros(-(-len(bias) // PANEL) * PANEL, dtype=np.float32)
    padded[: len(bias)] = bias
    return padded


def _tile(rows: int) -> Any:
    """c[r, :16] = start[:16] + sum_i a[r, i] b[i, :16] for `rows` rows, all given by addresses."""

    @no_type_check
    @intrinsic
    def tile(
        typingctx: Any, a: Any, a_stride: Any, b: Any, start: Any, c: Any, c_stride: Any, n: Any
    ) -> Any:
        address, count = types.uintp, types.intp
        signature = types.void(address, count, address, address, address, count, count)
        return signature, lambda context, builder, sig, args: _emit(context, builder, args, rows)

    return tile


def _emit(context: Any, builder: Any, args: Any, rows: int) -> Any:
    a, a_stride, b, start, c, c_stride, n = args
    columns, line = range(PANEL // LANES), PANEL * FLOAT
    fma = multiply_add(builder, LANES)

    def row(address: Any, stride: Any, r: int) -> Any:
        return builder.add(address, scaled(builder, stride, r * FLOAT))

    # LLVM keeps these in registers.
    sums = [[cgutils.alloca_once(builder, floats) for _ in columns] for _ in range(rows)]
    for j in columns:
        first = load(builder, moved(builder, start, j * LANES * FLOAT), floats)
        for r in range(rows):
            builder.store(first, sums[r][j])
    a_rows = [row(a, a_stride, r) for r in range(rows)]
    with cgutils.for_range(builder, n) as loop:
        panel = builder.add(b, scaled(builder, loop.index, line))
        weights = [load(builder, moved(builder, panel, j * LANES * FLOAT), floats) for j in columns]
        # Weights come from beyond the caches of a core: the next panel's during this one.
        prefetch(builder, builder.add(panel, scaled(builder, n, line)))
        offset = scaled(builder, loop.index, FLOAT)
        for r in range(rows):
            value = load(builder, builder.add(a_rows[r], offset), number)
            value = spread(builder, value, LANES)
            for j in columns:
                builder.store(fma(value, weights[j], builder.load(sums[r][j])), sums[r][j])
    for r in range(rows):
        for j in columns:
            target = moved(builder, row(c, c_stride, r), j * LANES * FLOAT)
            store(builder, builder.load(sums[r][j]), target)
    return context.get_dummy_value()


_tile1, _tile2, _tile_all = _tile(1), _tile(2), _tile(TILE_ROWS)


@no_type_check
@compiled()
def linear(x, packed, bias, first, stop, out):
    """out = x W^T + bias, for float32 arrays whose rows are contiguous.

    Args:
        x: "r i", or wider.
        packed: "t i p", from `pack`.
        bias: "t * p", from `pad`.
        first, stop: the panels to go through.
        out: "r t * p", or wider.
    """
    rows, inputs = x.shape[0], packed.shape[1]
    x_stride, out_stride = x.strides[0] // FLOAT, out.strides[0] // FLOAT
    x_at, out_at = x.ctypes.data, out.ctypes.data
    packed_at, bias_at = packed.ctypes.data, bias.ctypes.data
    for t in range(first, stop):
        panel = packed_at + t * inputs * PANEL * FLOAT
        start = bias_at + t * PANEL * FLOAT
        r = 0
        while r < rows:
            a = x_at + r * x_stride * FLOAT
            c = out_at + (r * out_stride + t * PANEL) * FLOAT
            if rows - r >= TILE_ROWS:
                _tile_all(a, x_stride, panel, start, c, out_stride, inputs)
                r += TILE_ROWS
            elif rows - r >= 2:
                _tile2(a, x_stride, panel, start, c, out_stride, inputs)
                r += 2
            else:
                _tile1(a, x_stride, panel, start, c, out_stride, inputs)
                r += 1
