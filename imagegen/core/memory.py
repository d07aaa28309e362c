"""How the C library keeps memory that PyTorch's CPU tensors have given back."""

from __future__ import annotations

import ctypes
import platform

# malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Let this process reuse the memory of tensors that were freed, instead of returning it.

    The GNU C library takes a tensor of more than 32 MiB, and at first of more than 128 KiB, from
    the kernel and gives it back when it is freed, so that the next one is mapped and zeroed page by
    page again. A training step frees and takes the same sizes each time, and up to a fifth of it
    was spent on that. The process keeps its peak memory until it ends.

    Returns:
        Whether it is so from now on: False without the GNU C library.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # One arena, because the others are mapped, however much they need.
    options = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_ARENA_MAX: 1}
    return all(mallopt(name, value) for name, value in options.items())
