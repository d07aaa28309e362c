"""Checkpoints of untrained models to draw from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import save_colour_checkpoint, save_tiny_checkpoint


@pytest.fixture(scope="module")
def grey(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of digits: 8x8, 1 channel, 17 levels."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("grey") / "tiny.ckpt")


@pytest.fixture(scope="module")
def colour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of images of 4x6, 3 channels, 256 levels."""
    return save_colour_checkpoint(tmp_path_factory.mktemp("colour"))
