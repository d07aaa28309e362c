"""Pieces of LLVM code that the loops' innermost parts are made of.

Addresses are whole numbers, as `array.ctypes.data` gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 8
"""Numbers of 32 bits in a vector."""
FLOAT = 4  # bytes

number, whole = ir.FloatType(), ir.IntType(32)
floats = ir.VectorType(number, LANES)


def moved(builder: Any, address: Any, offset: int) -> Any:
    """An address so many bytes further on."""
    return builder.add(address, ir.Constant(address.type, offset))


def scaled(builder: Any, index: Any, size: int) -> Any:
    """An index times a number of bytes."""
    return builder.mul(index, ir.Constant(index.type, size))


def load(builder: Any, address: Any, kind: Any, align: int = FLOAT) -> Any:
    """The values at an address."""
    return builder.load(builder.inttoptr(address, ir.PointerType(kind)), align=align)


def store(builder: Any, value: Any, address: Any) -> None:
    """Put a number or a vector of 32 bits at an address."""
    target = builder.inttoptr(address, ir.PointerType(value.type))
    builder.store(value, target, align=FLOAT)


def spread(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """A vector that holds one number in all lanes."""
    kind = ir.VectorType(value.type, lanes)
    empty = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(empty, value, ir.Constant(whole, 0))
    places = ir.Constant(ir.VectorType(whole, lanes), [0] * lanes)
    return builder.shuffle_vector(one, empty, places)


def multiply_add(builder: Any, lanes: int = LANES) -> Callable[[Any, Any, Any], Any]:
    """A function that gives a b + c of three vectors.

    It is rounded once where the target has an instruction for that, and after each operation where
    it has not: `llvm.fma` would call a function of the C library there, once for each number.
    """
    vector = ir.VectorType(number, lanes)
    kind = ir.FunctionType(vector, [vector] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{lanes}f32")
    return lambda a, b, c: builder.call(function, [a, b, c])


def prefetch(builder: Any, address: Any) -> None:
    """Ask for the line at an address, which need not be that of anything, to be read."""
    byte = ir.PointerType(ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [byte] + [whole] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    read, low_locality, data = 0, 2, 1
    arguments = [ir.Constant(whole, value) for value in (read, low_locality, data)]
    builder.call(function, [builder.inttoptr(address, byte), *arguments])
