"""The report of `+trainer.profiler=simple`, `advanced` or `pytorch`: where a run's time went."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pytorch_lightning.profilers import PassThroughProfiler, Profiler
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from imagegen.core.files import write_atomic

REPORT = "profile.txt"
_HEAD = 12


class ProfileReport:
    """Keeps what Lightning's profiler has measured, also of a run that was interrupted.

    Lightning logs the report at a level that is silent here, once a run has ended well, and forgets
    it then.

    Args:
        profiler: of the trainer, which has not started yet.
    """

    def __init__(self, profiler: Profiler) -> None:
        self._profiler = None if isinstance(profiler, PassThroughProfiler) else profiler
        self._text: str | None = None
        if self._profiler is not None:
            self._describe = profiler.describe
            profiler.describe = self._keep  # type: ignore[method-assign]

    @rank_zero_only
    def write(self, folder: Path) -> None:
        """Write `profile.txt`, of the latest training in this folder, and print how it begins."""
        if self._report():
            write_atomic(folder / REPORT, self._report())
            self._print(f"{folder / REPORT} begins")

    @rank_zero_only
    def say(self) -> None:
        """Print how the report begins, of a run that keeps nothing."""
        if self._report():
            self._print("the profile begins")

    def _report(self) -> str:
        if self._text is None:
            self._text = "" if self._profiler is None else self._profiler.summary()
        return self._text

    def _keep(self) -> Any:
        self._report()
        return self._describe()

    def _print(self, title: str) -> None:
        lines = [
            re.sub(r"\s*\t\s*|\s{2,}", "  ", line).strip() for line in self._report().splitlines()
        ]
        told = [line for line in lines if line.strip("- ")]
        print("\n".join([f"{title}:", *(f"  {line}" for line in told[:_HEAD])]))
