"""Values that a user types."""

from __future__ import annotations

import time

from imagegen.core.values import out_folder


def test_folders_of_jobs_side_by_side_have_names_of_their_own() -> None:
    names = set()
    for _ in range(5):
        names.add(out_folder(None, "samples"))
        time.sleep(0.002)
    assert len(names) == 5
