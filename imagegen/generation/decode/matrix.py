"""The layers' weights, prepared once in the precision that is used, and products with a few rows.

Axes: `l` layer, `r` row, `i` input, `o` output, `t` panel, `p` output in a panel, `w` number of a
panel's whole numbers, two of them where they take 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float, Float32, Int16

from imagegen.core.compiled.compile import compiled
from imagegen.generation.decode.bf16 import bf16_bits, call_back, narrow
from imagegen.generation.decode.integer import linear_integers, pack_integers, quantize
from imagegen.generation.decode.matmul import PANEL, linear, pack, pad

BF16 = 0
"""In place of a number of bits: bfloat16, multiplied outside of the loop."""


class Matrix(NamedTuple):
    """The linear layers of the same place in all blocks.

    Attributes:
        bits: 32 for float32, 16 or 8 for whole numbers, or `BF16`.
        packed: weights as float32, or nothing.
        whole: weights as whole numbers, or nothing; of `BF16`, their bits "l o i".
        steps: of the outputs' whole numbers.
        bias: zeros if there is no bias.
    """

    bits: int
    packed: Float32[np.ndarray, "l t i p"]
    whole: Int16[np.ndarray, "l t w"]
    steps: Float32[np.ndarray, "l o"]
    bias: Float32[np.ndarray, "l o"]

    @property
    def width(self) -> int:
        """Numbers in a row of the output, some of them padding."""
        return self.bias.shape[1]


def matrix(
    weights: Sequence[Float[np.ndarray, "o i"]],
    biases: Sequence[Float[np.ndarray, " o"]],
    bits: int,
) -> Matrix:
    """Prepare the weights and biases of all layers; `bits` as in `Matrix`."""
    layers = len(weights)
    bias = np.stack([pad(b) for b in biases])
    if bits == 32:
        packed = np.stack([pack(w) for w in weights])
        nothing = np.zeros((layers, 0, 0), dtype=np.int16)
        return Matrix(bits, packed, nothing, np.ones_like(bias), bias)
    nothing = np.zeros((layers, 0, 0, PANEL), dtype=np.float32)
    if bits == BF16:
        whole = np.stack([bf16_bits(w, bias.shape[1]) for w in weights])
        return Matrix(bits, nothing, whole, np.ones_like(bias), bias)
    both = [pack_integers(w, bits) for w in weights]
    whole = np.stack([w.reshape(len(w), -1).view(np.int16) for w, _ in both])
    return Matrix(bits, nothing, whole, np.stack([steps for _, steps in both]), bias)


@no_type_check
@compiled()
def round_rows(x, inputs, bits, whole, steps, first, stop):
    """What a product with weights of `bits` takes of some rows of x; see `quantize`."""
    if bits == BF16:
        narrow(x, inputs, whole, first, stop)
    elif bits < 32:
        quantize(x, inputs, whole, steps, first, stop)


@no_type_check
@compiled()
def multiply(x, whole, steps, m, layer, first, stop, out, product):
    """out = x W^T + bias for the panels from `first` to `stop` - 1.

    Args:
        x: "r i"; its contiguous rows are used where m has 32 bits.
        whole, steps: from `round_rows`, of just the inputs of `m`; used otherwise.
        m, layer: the weights.
        first, stop: panels of outputs.
        out: "r o" or wider, written.
        product: see `Rows.product`; it makes all panels.
    """
    if m.bits == BF16:
        call_back(product, m.whole[layer].ctypes.data)
    elif m.bits == 32:
        linear(x, m.packed[layer], m.bias[layer], first, stop, out)
    else:
        linear_integers(
            whole, steps, m.bits, m.whole[layer], m.steps[layer], m.bias[layer], first, stop, out
        )
