"""What a metrics.csv says, also while its run continues."""

from __future__ import annotations

import csv
from pathlib import Path


def read_rows(path: Path, before_step: int | None = None) -> list[dict[str, str]]:
    """The rows of a metrics file whose step is below `before_step`; broken ones are left out.

    So is a last line without an end: its last number may lack digits.

    Raises:
        OSError, ValueError: for a file that cannot be read, or is not text.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = file.readlines()
    except FileNotFoundError:
        return []
    rows = csv.DictReader(line for line in lines if line.endswith("\n"))
    whole = [row for row in rows if None not in row and None not in row.values()]
    if before_step is None:
        return whole
    return [row for row in whole if row["step"].isdigit() and int(row["step"]) < before_step]
