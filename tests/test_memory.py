"""Memory stays where it is, however long a process draws or trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning import Callback

from imagegen.core.spec import ImageSpec
from imagegen.generation.job_folder import JobFolder
from imagegen.generation.sampling_loop import complete, generate
from tests.helpers import DRAWING, run_train, sample, save_tiny_checkpoint, tiny_model

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


@pytest.mark.slow
def test_ten_thousand_images_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = save_tiny_checkpoint(tmp_path / "digits.ckpt")
    write, seen = JobFolder.write_image, []

    def write_image(self: JobFolder, name: str, image: Any) -> None:
        write(self, name, image)
        if int(name[:5]) % 500 == 499:
            seen.append(resident())

    monkeypatch.setattr(JobFolder, "write_image", write_image)
    out = sample(ckpt, tmp_path / "out", "n=10000")
    assert len(seen) == 20
    assert len(list((out / "images").iterdir())) == 10000
    print("\nMiB after each 500 images:", *(round(size / MIB, 1) for size in seen))
    # Less than a KiB for each of the later images.
    assert max(seen[5:]) - max(seen[:5]) < 6 * MIB, seen


@pytest.mark.parametrize(
    ("validations", "batches"), [(12, 1), pytest.param(120, 10, marks=pytest.mark.slow)]
)
def test_many_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validations: int, batches: int
) -> None:
    witness = Witness()
    monkeypatch.setattr("tests.test_memory.make_witness", lambda: witness, raising=False)
    options = [
        *DRAWING,
        f"trainer.max_epochs={validations}",
        f"trainer.limit_train_batches={batches}",
        "callbacks.ema.decay=0.9",
        "+callbacks.witness._target_=tests.test_memory.make_witness",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    assert run_train(monkeypatch, *options) == 0
    seen = witness.seen
    assert len(seen) == validations
    few = validations // 10
    print(f"\nMiB after every {few} validations:", *(round(s / MIB, 1) for s in seen[::few]))
    early, late = seen[: validations * 5 // 12], seen[validations * 2 // 3 :]
    assert max(late) - max(early) < 4 * MIB, seen
