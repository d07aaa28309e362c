"""Threads that go through the layers together, each with its share of the work.

They meet dozens of times in a step of some hundred microseconds, so they wait by looking again
and again; where the others do not come, as there may be more threads than free cores, they let
other threads run.
"""

from __future__ import annotations

from typing import Any, no_type_check

import numpy as np
from jaxtyping import Int64
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from imagegen.core.compiled.compile import compiled, inline, target

COUNT, GENERATION, ABANDONED, SIZE = 0, 8, 16, 24
"""Places in the array of a team, each on a cache line of its own."""
LOOKS = 4000
"""Looks before other threads may run, some ten microseconds."""


def team_flags() -> Int64[np.ndarray, "24"]:
    """What the threads of a team tell each other."""
    return np.zeros(SIZE, dtype=np.int64)


@no_type_check
@intrinsic
def _load(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.PointerType(ir.IntType(64)))
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.uintp), codegen


@no_type_check
@intrinsic
def _store(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.PointerType(ir.IntType(64)))
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.uintp, types.int64), codegen


@no_type_check
@intrinsic
def _increment(typingctx: Any, address: Any) -> Any:
    """Adds one; the value before."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.PointerType(ir.IntType(64)))
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(types.uintp), codegen


@no_type_check
@intrinsic
def _pause(typingctx: Any) -> Any:
    """Tells the processor that this is a loop of looks."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if target().is_x86:
            kind = ir.FunctionType(ir.VoidType(), [])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause")
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@no_type_check
@intrinsic
def _let_others_run(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        name = "SwitchToThread" if "windows" in target().triple else "sched_yield"
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), codegen


@no_type_check
@compiled()
def meet(flags, members):
    """Continue when all members of the team are here, or one has abandoned it."""
    if members == 1:
        return
    at = flags.ctypes.data
    generation = _load(at + GENERATION * 8)
    if _increment(at + COUNT * 8) == members - 1:
        _store(at + COUNT * 8, 0)
        _store(at + GENERATION * 8, generation + 1)
        return
    looks = 0
    while _load(at + GENERATION * 8) == generation and _load(at + ABANDONED * 8) == 0:
        looks += 1
        if looks < LOOKS:
            _pause()
        else:
            _let_others_run()


@no_type_check
@compiled()
def abandon(flags):
    """Let nobody wait for this thread any more; what the team makes from now on is of no use."""
    _store(flags.ctypes.data + ABANDONED * 8, 1)


@no_type_check
@inline()
def share(count, member, members):
    """The part of `count` things that is a member's: the first one and the one after the last."""
    return count * member // members, count * (member + 1) // members
