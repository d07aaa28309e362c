"""A checkpoint to evaluate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import save_tiny_checkpoint


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of an untrained model of digits."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("ckpt") / "tiny.ckpt")
