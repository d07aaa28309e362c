from __future__ import annotations

import pytest

from imagegen.cli.messages import report
from imagegen.core.errors import UserError


def test_what_was_typed_cannot_break_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    report(UserError("n=1\n2\x1b[31m\udc80é, but it must be a whole number."))
    expected = "error: n=1\\n2\\x1b[31m\\udc80é, but it must be a whole number.\n"
    assert capsys.readouterr().err == expected
