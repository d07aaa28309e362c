"""Threads of a team meet, and nobody waits for ever."""

from __future__ import annotations

import threading

import numpy as np
from numba import njit

from imagegen.generation.decode.team import abandon, meet, share, team_flags


@njit(nogil=True)
def _count(flags, member, members, rounds, counts, seen):  # type: ignore[no-untyped-def]
    for turn in range(rounds):
        counts[member * 16] += 1
        meet(flags, members)
        total = 0
        for other in range(members):
            total += counts[other * 16]
        seen[member, turn] = total
        meet(flags, members)


def _together(members: int, work: object) -> None:
    threads = [threading.Thread(target=work, args=(member,)) for member in range(members)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_all_see_what_all_have_done() -> None:
    # More members than cores: they have to let each other run.
    for members in (1, 2, 5):
        flags, rounds = team_flags(), 300
        counts, seen = np.zeros(16 * members, np.int64), np.zeros((members, rounds), np.int64)
        _together(
            members, lambda m, a=(flags, counts, seen), n=members: _count(a[0], m, n, 300, *a[1:])
        )
        assert np.array_equal(seen, np.tile(members * np.arange(1, rounds + 1), (members, 1)))


def test_an_abandoned_team_waits_for_nobody() -> None:
    flags = team_flags()

    def work(member: int) -> None:
        if member == 0:
            meet(flags, 2)
        else:
            abandon(flags)

    _together(2, work)


def test_shares_are_all() -> None:
    for count in range(12):
        for members in range(1, 6):
            parts = [share(count, member, members) for member in range(members)]
            assert [i for first, stop in parts for i in range(first, stop)] == list(range(count))
