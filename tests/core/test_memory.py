from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from imagegen.core.memory import keep_freed_memory

torch.set_num_threads(1)

def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        torch.ones(9 * 2**20)  # 36 MiB, which the C library would map anew each time
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = faults(8)
kept = keep_freed_memory()
faults(24)  # until the heap has found its places
print(plain, faults(8), kept)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
def test_freed_memory_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True)
    plain, kept, answer = done.stdout.split()
    assert answer == "True", done.stderr
    assert int(kept) < 1000 < int(plain)


def test_says_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    from imagegen.core.memory import keep_freed_memory

    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()
