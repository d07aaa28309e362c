"""How the loops are compiled, and for which processor."""

from __future__ import annotations

import functools
from typing import NamedTuple

from numba import njit
from numba.core.registry import cpu_target

# What the compiler may assume: sums may be taken in lanes, the same for every row, and products
# may be fused. nan and inf stay what they are.
FAST = {"reassoc", "contract", "nsz", "arcp"}

# Without counts of references to arrays: nothing here makes or drops any, and they would take most
# of the time of compiling.
compiled = functools.partial(njit, cache=True, nogil=True, error_model="numpy", _nrt=False)
fast = functools.partial(compiled, fastmath=FAST)
inline = functools.partial(njit, inline="always", error_model="numpy")

INSTRUCTION_SETS = {"neon": "NEON", "fma": "FMA", "avx2": "AVX2", "avx512f": "AVX-512"}
"""Those that change the loops' code: their usual names, by LLVM's."""


class Target(NamedTuple):
    """What code is compiled for: this machine, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name.

    Attributes:
        triple: architecture and system, as LLVM names them.
        processor: LLVM's name of its kind.
        features: whether the target has each of the features that LLVM was given. Where it was
            given only the processor, the features that come with it are missing.
    """

    triple: str
    processor: str
    features: dict[str, bool]

    @property
    def is_x86(self) -> bool:
        """Whether x86 instructions may be generated."""
        return self.triple.startswith(("x86_64", "i386", "i686"))

    @property
    def instruction_sets(self) -> list[str]:
        """Those that the target has and that change the loops' code, such as AVX2."""
        return [name for flag, name in INSTRUCTION_SETS.items() if self.features.get(flag, False)]


@functools.cache
def target() -> Target:
    """What Numba compiles for in this process; nothing else may decide what is generated."""
    triple, processor, features = cpu_target.target_context.codegen().magic_tuple()
    # LLVM, too, believes the last mention of a feature.
    given = {flag[1:]: flag[0] == "+" for flag in features.split(",") if flag}
    return Target(triple, processor, given)
