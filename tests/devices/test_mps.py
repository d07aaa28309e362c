"""Models work on the GPU of a Mac as they do on the CPU, as far as that shows without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from imagegen.core.errors import UserError
from imagegen.core.values import resolve_device
from imagegen.evaluation import checks
from imagegen.evaluation.scores import score_images
from imagegen.generation.decode import choose_decoder
from imagegen.heads.controls import Controls
from tests.devices import cases, runs, ways
from tests.devices.simulated import mps


@pytest.mark.parametrize("way", list(ways.OF_MECHANISMS))
@pytest.mark.parametrize("case", cases.MECHANISM_CASES)
def test_mechanisms(case: Any, way: str) -> None:
    ways.check(mps(), case, ways.OF_MECHANISMS[way])


@pytest.mark.parametrize("way", list(ways.OF_HEADS))
@pytest.mark.parametrize("case", cases.HEAD_CASES)
def test_heads(case: Any, way: str) -> None:
    ways.check(mps(), case, ways.OF_HEADS[way])


@pytest.mark.parametrize("case", cases.MECHANISM_CASES)
def test_models_are_made_there(case: Any) -> None:
    ways.build_on(mps(), case)


@pytest.mark.parametrize("order", ["raster", "any"])
def test_training(order: str, tmp_path: Path) -> None:
    runs.trains_and_resumes(mps(), tmp_path / "run", f"model.order={order}")


def test_find_lr() -> None:
    runs.finds_a_rate(mps())


def test_commands(tmp_path: Path) -> None:
    runs.commands(mps(), tmp_path)


def test_there_are_no_compiled_loops() -> None:
    model = cases.make(cases.HEAD_CASES[0].values[0])
    with runs.everything_on(mps()):
        model.to("mps")
        assert choose_decoder(model, Controls()) is None
        with pytest.raises(UserError, match="precision=32 needs compiled loops, which are missing"):
            score_images(model, np.zeros((1, 3, 2, 1), dtype=np.uint8), precision="32")


def test_verify_says_where_it_computes_in_float64() -> None:
    model = cases.make(cases.HEAD_CASES[0].values[0])
    with mps(), torch.inference_mode():
        model.to("mps")
        sequence = torch.zeros(1, 6, 1, dtype=torch.uint8, device="mps")
        found = checks.forms_agree_exactly(model, sequence)
        assert found.ok
        assert found.figure.endswith("bits per value, on the CPU")
        assert model.device.type == "mps"


def test_it_is_taken_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (True, False):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        # Compiled loops are faster than steps that each wait for the GPU.
        assert resolve_device("auto") == torch.device("cpu")
        if there:
            assert resolve_device("mps") == torch.device("mps")
            continue
        with pytest.raises(UserError, match="device=mps, but PyTorch finds no GPU of a Mac here"):
            resolve_device("mps")
    with pytest.raises(UserError, match="it can be auto, cpu, cuda, cuda:0 or mps"):
        resolve_device("mps:1")
