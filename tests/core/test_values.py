"""Values that a user types."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from imagegen.core.errors import UserError
from imagegen.core.values import as_typed, out_folder


def test_folders_of_jobs_side_by_side_have_names_of_their_own() -> None:
    names = set()
    for _ in range(5):
        names.add(out_folder(None, "samples"))
        time.sleep(0.002)
    assert len(names) == 5


def test_brackets_are_shown_as_they_are_typed() -> None:
    assert as_typed(["a", 1.5, [True, None]]) == "[a,1.5,[true,null]]"
    assert as_typed({"a": [1]}) == "{a:[1]}"
    for value in (["a", "b"], {"a": 1}):
        sentence = re.escape(f"out={as_typed(value)}, but it must be one path.")
        with pytest.raises(UserError, match=sentence):
            out_folder(value, "samples")
    assert out_folder("a[1]", "samples") == Path.cwd() / "a[1]"
