"""metrics.csv, which every run writes."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from imagegen.core.files import write_atomic
from imagegen.tracking.metrics_rows import read_rows


class MetricsFile(Logger):
    """Writes metrics.csv: one row per step, up to date whenever it is read.

    Resuming keeps the rows of the steps that the checkpoint knows and drops later ones, which will
    come again.

    Args:
        run_dir: the run folder.
        resume_step: optimizer steps done by the checkpoint resumed; None starts a new file.
    """

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        super().__init__()
        self.path = Path(run_dir) / "metrics.csv"
        self._resume_step = resume_step
        self._file: IO[str] | None = None
        self._columns: list[str] = ["step"]
        self._last: dict[str, Any] = {}
        self._last_offset = 0

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def version(self) -> str:
        """Nothing: a run folder holds one file."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder holds the configuration."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add the metrics to the row of `step`, which is the last row or a new one."""
        if self._file is None:
            self._open()
        step = int(step) if step is not None else int(self._last.get("step", -1)) + 1
        row = {"step": step, **{key: _number(value) for key, value in metrics.items()}}
        if row["step"] == self._last.get("step"):
            row = {**self._last, **row}
        else:
            self._last = {}
        new = [key for key in row if key not in self._columns]
        if new:
            self._rewrite([*self._columns, *sorted(new)])
        self._append(row)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the file; later metrics are added to it."""
        if self._file is not None:
            self._file.close()
            self._file, self._last, self._resume_step = None, {}, sys.maxsize

    def _open(self) -> None:
        self._columns = ["step"]
        rows = read_rows(self.path, self._resume_step) if self._resume_step is not None else []
        for row in rows:
            self._columns += [key for key in row if key not in self._columns]
        self._write_all(rows)

    def _append(self, row: dict[str, Any]) -> None:
        assert self._file is not None
        if self._last:
            self._file.seek(self._last_offset)
            self._file.truncate()
        else:
            self._last_offset = self._file.seek(0, os.SEEK_END)
        csv.DictWriter(self._file, self._columns, restval="").writerow(row)
        self._file.flush()
        self._last = row

    def _rewrite(self, columns: list[str]) -> None:
        """Give the file more columns."""
        rows = read_rows(self.path)
        if self._last:
            rows = rows[:-1]
        self._last = {}
        self._columns = columns
        self._write_all(rows)

    def _write_all(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        if self._file is not None:
            self._file.close()
        write_atomic(self.path, text.getvalue())
        self._file = open(self.path, "r+", newline="", encoding="utf-8")  # noqa: SIM115


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
