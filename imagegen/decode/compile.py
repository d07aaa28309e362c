"""How the loops are compiled."""

from __future__ import annotations

import functools

from numba import njit

# What the compiler may assume: sums may be taken in lanes, the same for every row, and products
# may be fused. nan and inf stay what they are.
FAST = {"reassoc", "contract", "nsz", "arcp"}

# Without counts of references to arrays: nothing here makes or drops any, and they would take most
# of the time of compiling.
compiled = functools.partial(njit, cache=True, nogil=True, error_model="numpy", _nrt=False)
fast = functools.partial(compiled, fastmath=FAST)
inline = functools.partial(njit, inline="always", error_model="numpy")
