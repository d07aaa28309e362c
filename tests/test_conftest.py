"""The safeguards of conftest.py do guard."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from imagegen.generation.images import save_png


def test_wrong_shapes_and_dtypes_are_noticed(tmp_path: Path) -> None:
    save_png(tmp_path / "image.png", np.zeros((2, 2, 1), np.uint8))
    with pytest.raises(TypeCheckError):
        save_png(tmp_path / "image.png", np.zeros((2, 2), np.uint8))
    with pytest.raises(TypeCheckError):
        save_png(tmp_path / "image.png", np.zeros((2, 2, 1), np.float32))


def test_other_machines_are_out_of_reach() -> None:
    with pytest.raises(AssertionError, match="no network"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)


def test_this_machine_is_within_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


def test_wandb_is_offline_and_knows_no_login() -> None:
    assert os.environ["WANDB_MODE"] == "offline"
    assert "WANDB_API_KEY" not in os.environ
    assert not Path(os.environ["NETRC"]).exists()


def test_one_thread_each() -> None:
    assert torch.get_num_threads() == 1
