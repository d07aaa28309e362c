from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from imagegen.cli import PROJECT_ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure for minutes")
def test_without_a_gpu_it_says_so_and_stops(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "benchmarks/gpu.sh", str(tmp_path / "out")],
        cwd=PROJECT_ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "there is no CUDA GPU here: nothing was checked\n"
    assert not (tmp_path / "out").exists()
