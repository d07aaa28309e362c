"""Reads the file in which wandb keeps a run, `run-ID.wandb`, as far as it has been written.

wandb's own resume does not serve: it knows the last step from the server only, so that a run kept
offline would repeat rows, or lack those that were not written when the machine was lost. wandb has
no public reader of the file.
"""

from __future__ import annotations

import glob
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEP = "trainer/global_step"
_BLOCK = 32768
_HEADER = 7
_WHOLE, _LAST = 1, 4


def last_wandb_step(run_dir: Path, run_id: str) -> int | None:
    """The last step of a run's rows in the run folder, written before it was stopped or killed.

    Args:
        run_dir: the run folder, with the files of this run, and those that continued it.
        run_id: the run's id in wandb.

    Returns:
        The step, as `trainer/global_step` has it; -1 where no row was written, None where there is
        no such run.
    """
    files = list((run_dir / "wandb").glob(f"*run-*/run-{glob.escape(run_id)}.wandb"))
    if not files:
        return None
    steps = [-1]
    for file in files:
        try:
            steps.extend(_steps(file.read_bytes()))
        except Exception:  # The format is wandb's own and may change.
            continue
    return max(steps)


def _steps(data: bytes) -> Iterator[int]:
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    for content in _records(data):
        record = messages.Record.FromString(content)
        for item in record.history.item:
            if STEP in (item.key, *item.nested_key):
                yield int(json.loads(item.value_json))


def _records(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format: blocks of parts, each with checksum, length and kind."""
    place, record = _HEADER, b""  # wandb's own header comes first
    while place + _HEADER <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += _HEADER
        if place + length > len(data):  # Killed while it was written
            return
        record += data[place : place + length]
        place += length
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
