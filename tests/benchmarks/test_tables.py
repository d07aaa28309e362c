"""The rows of the training benchmarks are options that train.py takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import mechanisms, quality
from benchmarks.trainings import Table, folder_of
from imagegen.cli.entry import compose

TABLES = {**mechanisms.TABLES, **quality.TABLES}


@pytest.mark.parametrize("name", TABLES)
def test_rows_compose_and_have_folders_of_their_own(name: str) -> None:
    table: Table = TABLES[name]
    folders = set()
    for row in table.rows:
        compose("train", [*table.options_of(row), "logger=none"])
        folders.update(folder_of(Path("runs"), name, row, s) for s in table.seeds_of(row))
    assert len(folders) == sum(len(table.seeds_of(row)) for row in table.rows)
