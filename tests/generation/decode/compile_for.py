"""Compiles the loops for another processor, in a process of its own; nothing of it is run.

    NUMBA_CPU_NAME=generic NUMBA_CPU_FEATURES=+neon \\
        python -m tests.generation.decode.compile_for aarch64-unknown-linux-gnu \\
            linear.LinearAttention ...

LLVM ends the process where it is given what the processor lacks. Prints the target, and the
machine code of the innermost parts.
"""

from __future__ import annotations

import sys
from typing import Any

import llvmlite.binding as llvm

TRIPLE, *KINDS = sys.argv[1:]
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
llvm.get_process_triple = lambda: TRIPLE

import numba  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from numba import types  # noqa: E402
from numba.core.caching import NullCache  # noqa: E402

from imagegen.core.compiled.compile import target  # noqa: E402
from imagegen.core.spec import ImageSpec  # noqa: E402
from imagegen.generation import decode  # noqa: E402


class _Compiled(Exception):
    pass


def _compile_only(*arguments: Any) -> None:
    from imagegen.generation.decode.loop import run

    run.compile(tuple(numba.typeof(argument) for argument in arguments))
    raise _Compiled


def _machine_code(function: Any, *arguments: Any) -> str:
    function._cache = NullCache()
    function.compile(arguments)
    (code,) = function.inspect_asm().values()
    return str(code)


@torch.no_grad()
def main() -> None:
    """What the module says."""
    for kind in KINDS:
        from tests.helpers import tiny_model  # imports Lightning

        fused = decode._fused()
        fused.run = _compile_only
        attention = {"_target_": f"imagegen.attention.{kind}"}
        decoder = fused.FusedDecoder(tiny_model(ImageSpec(4, 4, 1, 17), attention=attention))
        try:
            decoder.parameters(np.zeros((1, 1, 1), dtype=np.uint8))
        except _Compiled:
            continue
        raise AssertionError("nothing was compiled")
    print(target().triple, target().processor, *target().instruction_sets)

    from imagegen.generation.decode.integer import linear_integers
    from imagegen.generation.decode.matmul import linear

    def array(number: Any, axes: int) -> Any:
        return types.Array(number, axes, "C")

    one, two = array(types.float32, 1), array(types.float32, 2)
    whole, at = array(types.int16, 2), types.int64
    print(_machine_code(linear, two, array(types.float32, 3), one, at, at, two))
    print(_machine_code(linear_integers, whole, one, at, whole, one, one, at, at, two))


if __name__ == "__main__":
    main()
