"""Models work on an NVIDIA GPU as they do on the CPU, as far as that shows without one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from imagegen.core.spec import ImageSpec
from imagegen.evaluation import checks
from imagegen.evaluation.scores import score_images
from imagegen.generation.sampling_loop import generate
from imagegen.model.transformer import ImageTransformer, ModelState
from tests.devices import cases, runs, ways
from tests.devices.simulated import cuda
from tests.helpers import tiny_model


@pytest.mark.parametrize("way", list(ways.OF_MECHANISMS))
@pytest.mark.parametrize("case", cases.MECHANISM_CASES)
def test_mechanisms(case: Any, way: str) -> None:
    ways.check(cuda(), case, ways.OF_MECHANISMS[way])


@pytest.mark.parametrize("way", list(ways.OF_HEADS))
@pytest.mark.parametrize("case", cases.HEAD_CASES)
def test_heads(case: Any, way: str) -> None:
    ways.check(cuda(), case, ways.OF_HEADS[way])


@pytest.mark.parametrize("case", cases.MECHANISM_CASES)
def test_models_are_made_there(case: Any) -> None:
    ways.build_on(cuda(), case)


@pytest.mark.parametrize("order", ["raster", "any"])
def test_training(order: str, tmp_path: Path) -> None:
    runs.trains_and_resumes(cuda(), tmp_path / "run", f"model.order={order}")


def test_find_lr() -> None:
    runs.finds_a_rate(cuda())


def test_commands(tmp_path: Path) -> None:
    runs.commands(cuda(), tmp_path)


def test_scores_as_drawn() -> None:
    model, images = (
        cases.make(cases.HEAD_CASES[0].values[0]),
        np.zeros((3, 3, 2, 1), dtype=np.uint8),
    )
    labels = np.array([0, 2, -1])
    expected = score_images(model, images, labels=labels)
    with runs.everything_on(cuda()):
        found = score_images(model.to("cuda"), images, labels=labels, precision="32")
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_company_may_change_the_rounding_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(ImageSpec(4, 5, 1, 17))
    step, scale, levels = ImageTransformer.step, 1e-5, itertools.count()

    def by_rows(self: ImageTransformer, values: Tensor | None, state: ModelState) -> Any:
        parameters, state = step(self, values, state)
        return parameters + scale * len(parameters) * parameters.sign(), state

    def differing(*args: Any, **kwargs: Any) -> Any:
        for batch in generate(*args, **kwargs):
            batch[:, -1, -1] = next(levels) % 17
            yield batch

    monkeypatch.setattr(ImageTransformer, "step", by_rows)
    # The last pixel falls otherwise each time, which rounding alone does too seldom to be seen.
    monkeypatch.setattr(checks, "generate", differing)
    with torch.inference_mode():
        found = checks.images_do_not_depend_on_company(model, seed=0)
        assert found.ok is False
        assert found.figure == "2 of 40 values differ"
        with cuda():
            model.to("cuda")
            found = checks.images_do_not_depend_on_company(model, seed=0)
            assert found.ok
            assert found.tolerance == "0.001"
            assert found.figure.startswith("2 of 40 values differ, ")
            assert found.figure.endswith(" bits/dim")
            scale = 1e-2
            assert checks.images_do_not_depend_on_company(model, seed=0).ok is False
