"""Matrix products of bfloat16 by oneDNN, PyTorch's library, for processors that have AMX.

AMX multiplies tiles of 16 rows at once, but Numba cannot generate it, so that the compiled loop
calls back for every product. Which kernel oneDNN takes depends on the number of rows, and so might
the order of sums: products are always of one block of rows, some of them padding, so that an image
does not depend on how many others there are.

Axes: `l` layer, `r` row, `i` input, `o` output.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, no_type_check

import numpy as np
import torch
from jaxtyping import Float, Int16
from llvmlite import ir
from numba import int16, int32, types
from numba.extending import intrinsic

from imagegen.core.compiled.compile import fast
from imagegen.core.compiled.elementwise import as_int

if TYPE_CHECKING:
    from imagegen.generation.decode.loop import Rows, Weights
else:  # Annotations are checked in tests; the loop imports from here.
    Rows = Weights = Any

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def why_not() -> str | None:
    """Why there are no such products in this process; None where there are."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN multiplies no bfloat16 on this processor"
    return None


def bf16_bits(weight: Float[np.ndarray, "o i"], outputs: int) -> Int16[np.ndarray, "outputs i"]:
    """The bits of weights rounded to bfloat16, with zeros for outputs that are added."""
    padded = torch.zeros(outputs, weight.shape[1], dtype=torch.bfloat16)
    padded[: len(weight)] = torch.from_numpy(weight)
    bits: np.ndarray = padded.view(torch.int16).numpy()
    return bits


@no_type_check
@fast()
def narrow(x, inputs, out, first, stop):
    """out = bits of bfloat16 of the first inputs of some rows of x, int16; nan stays nan."""
    for r in range(first, stop):
        row, narrowed = x[r], out[r]
        for i in range(inputs):
            bits = as_int(row[i])
            nearest = (bits + int32(0x7FFF) + ((bits >> int32(16)) & int32(1))) >> int32(16)
            narrowed[i] = int16(nearest if row[i] == row[i] else int32(0x7FC0))


@no_type_check
@intrinsic
def call_back(typingctx: Any, function: Any, weights: Any) -> Any:
    """Call `Rows.product` with the address of the weights of a layer."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [args[1].type])
        builder.call(builder.inttoptr(args[0], ir.PointerType(kind)), [args[1]])
        return context.get_dummy_value()

    return types.void(types.intp, types.uintp), codegen


class Products:
    """The layers of a model as oneDNN multiplies by them.

    Args:
        weights: whose layers are of bfloat16.
        block: rows of a product, as many as `Rows.whole` has.
    """

    def __init__(self, weights: Weights, block: int) -> None:
        pack = torch.ops.mkldnn._reorder_linear_weight.default
        outputs = {"mix": "given", "out": "y", "up": "hidden", "down": "y"}
        self.layers = {
            bits.ctypes.data: (
                bits.shape[1],
                pack(torch.from_numpy(bits).view(torch.bfloat16), block),
                torch.from_numpy(bias).bfloat16(),
                output,
            )
            for name, output in outputs.items()
            for bits, bias in zip(*_layers_of(weights, name), strict=True)
        }

    @contextmanager
    def serve(self, rows: Rows) -> Iterator[Rows]:
        """Rows that go through the loop in this thread, which calls back while the block runs.

        Raises:
            BaseException: at the end, what a product raised.
        """
        linear = torch.ops.mkldnn._linear_pointwise.default
        x = torch.from_numpy(rows.whole).view(torch.bfloat16)
        results = {name: torch.from_numpy(getattr(rows, name)) for name in ("given", "y", "hidden")}
        errors: list[BaseException] = []

        def product(address: int) -> None:
            try:
                inputs, weight, bias, output = self.layers[address]
                y = linear(x[:, :inputs], weight, bias, "none", [], "")
                result = results[output]
                result[:, : y.shape[1]] = y[: len(result)]
            except BaseException as error:  # which cannot go through compiled code
                errors.append(error)

        callback = _Callback(product)
        with torch.inference_mode():
            # A new thread takes over PyTorch's number of threads when it is asked for it.
            torch.get_num_threads()
            yield rows._replace(product=ctypes.cast(callback, ctypes.c_void_p).value or 0)
        if errors:
            raise errors[0]


def _layers_of(weights: Weights, name: str) -> tuple[np.ndarray, np.ndarray]:
    matrix = getattr(weights, name)
    return matrix.whole, matrix.bias
