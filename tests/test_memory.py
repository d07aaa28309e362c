"""Memory stays where it is, however long a process draws or trains."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning import Callback

import train
from imagegen.generate import complete, generate
from imagegen.spec import ImageSpec
from tests.helpers import tiny_model
from tests.test_run import SMALL

STATM = Path("/proc/self/statm")
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not STATM.exists(), reason="reads /proc")


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Witness(Callback):
    """Notes the memory after each validation."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_validation_end(self, *args: Any) -> None:
        self.seen.append(resident())


def test_many_images() -> None:
    model = tiny_model(ImageSpec(height=6, width=6, channels=1, levels=16))
    images = next(generate(model, 16))
    seen = []
    for first in range(0, 24 * 64, 64):
        for _ in generate(model, 64, start=first):
            pass
        complete(model, images, [5] * 16, 4, seed=first)
        seen.append(resident())
    assert max(seen[16:]) - max(seen[:8]) < 2 * MIB, seen


def test_many_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = Witness()
    monkeypatch.setattr("tests.test_memory.make_witness", lambda: witness, raising=False)
    options = [
        *SMALL,
        "trainer.max_epochs=12",
        "trainer.limit_train_batches=1",
        "callbacks.ema.decay=0.9",
        "+callbacks.witness._target_=tests.test_memory.make_witness",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    train.main()
    assert len(witness.seen) == 12
    assert max(witness.seen[8:]) - max(witness.seen[:5]) < 4 * MIB, witness.seen
