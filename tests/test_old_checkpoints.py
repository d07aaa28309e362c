"""Checkpoints that earlier versions wrote load for ever, and draw and score as they did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from imagegen.checkpoint.reading import FORMAT_VERSION, KEY, load_checkpoint, read_resume_state
from imagegen.core.errors import UserError
from imagegen.evaluation.checks import all_checks
from imagegen.generation.sampling_loop import generate
from tests.checkpoints.make import make

FOLDER = Path(__file__).parent / "checkpoints"
KEPT = sorted(FOLDER.glob("*.ckpt"))


def test_they_are_there() -> None:
    names = {path.stem for path in KEPT}
    assert names >= {f"format1-{name}" for name in ("default-linear", "paper-softmax", "hybrid")}
    assert {path.stem for path in FOLDER.glob("*.npz")} == names


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_old_checkpoints_score_and_draw_as_they_did(path: Path) -> None:
    assert path.stat().st_size < 150_000
    model = load_checkpoint(path).model
    expected = np.load(path.with_suffix(".npz"))
    with torch.inference_mode():
        found = model.bits_per_dim(torch.from_numpy(expected["images"]))
    np.testing.assert_allclose(found.numpy(), expected["bits_per_dim"], rtol=1e-5)
    # Trained a little: better than the log2(17) = 4.09 of knowing nothing.
    assert expected["bits_per_dim"].mean() < 4
    drawn = expected["drawn"]
    np.testing.assert_array_equal(next(generate(model, len(drawn), seed=0)), drawn)
    assert len(np.unique(drawn)) > 5


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_their_training_can_go_on(path: Path) -> None:
    state = read_resume_state(path)
    assert state["step"] == 30
    assert "trainer.max_steps=30" in state["metadata"]["overrides"]


def test_a_newer_one_is_refused(tmp_path: Path) -> None:
    content = torch.load(KEPT[0], weights_only=True)
    content[KEY]["format_version"] = FORMAT_VERSION + 1
    torch.save(content, tmp_path / "newer.ckpt")
    for read in (load_checkpoint, read_resume_state):
        with pytest.raises(UserError, match=r"newer than the \d+ that this version reads; update"):
            read(tmp_path / "newer.ckpt")


def texts(content: Any) -> Iterator[str]:
    """All strings in plain containers."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        yield from texts([*content.keys(), *content.values()])
    elif isinstance(content, list | tuple):
        for item in content:
            yield from texts(item)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_they_name_no_folder_of_the_machine_they_were_made_on(path: Path) -> None:
    found = list(texts(torch.load(path, weights_only=True)))
    assert "RUN/checkpoints" in found
    assert not [text for text in found if text.startswith(("/", "~")) or ":\\" in text]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_they_pass_every_check(path: Path) -> None:
    images = np.load(path.with_suffix(".npz"))["images"][:1]
    checks = list(all_checks(load_checkpoint(path).model, images, seed=0))
    assert {check.name: check.figure for check in checks if check.ok is False} == {}
    assert sum(check.ok is True for check in checks) >= 7


@pytest.mark.slow
def test_new_ones_can_be_made(tmp_path: Path) -> None:
    path = make("paper-softmax", tmp_path)
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".ckpt", ".npz"]
    test_they_name_no_folder_of_the_machine_they_were_made_on(path)
    test_old_checkpoints_score_and_draw_as_they_did(path)
    test_their_training_can_go_on(path)
    with pytest.raises(SystemExit, match="is kept as it is"):
        make("paper-softmax", tmp_path)
