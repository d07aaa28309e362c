"""Bits per hidden value given the kept ones: exact, estimated, and by a model's own order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from imagegen.cli.entry import compose
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.digits import Digits
from imagegen.data.regions import read_region
from imagegen.evaluation.hidden import score_hidden
from imagegen.evaluation.scores import run, score_images
from imagegen.generation.sampling_loop import generate
from imagegen.generation.sampling_request import kept_steps
from tests.generation.helpers import exact_conditional, log_prob_of_all, mask_of, toy
from tests.helpers import tiny_model
from tests.model.helpers import NEIGHBOURHOOD


def evaluate(ckpt: Path, *overrides: str) -> dict[str, Any]:
    return run(compose("evaluate", [f"ckpt={ckpt}", "device=cpu", *overrides]))


def test_the_estimate_is_that_of_enumeration() -> None:
    model, visible = toy("grey"), mask_of("grey")
    images = next(generate(model, 4, seed=2))
    scores, reports = score_hidden(model, images, np.stack([visible] * 4), 512, 3)
    assert sorted(reports) == [0, 1, 2, 3]
    logs = log_prob_of_all(model)
    for image, score in zip(images, scores, strict=True):
        possible, exact, _ = exact_conditional(model, image, visible, logs, logs)
        (same,) = (possible == image).reshape(len(possible), -1).all(axis=1).nonzero()
        hidden = int((~visible).sum())
        assert score == pytest.approx(-math.log2(exact[same[0]]) / hidden, abs=0.1)


def test_a_part_that_comes_first_is_exact() -> None:
    spec = ImageSpec(4, 3, 3)
    model = tiny_model(spec, embedding=NEIGHBOURHOOD, tokens="pixel")
    images = next(generate(model, 3, seed=2))
    visible = np.zeros((3, 4, 3), dtype=bool)
    visible[:, :2] = visible[1, 2, 0] = True
    scores, reports = score_hidden(model, images, visible, 8, 2)
    assert not reports
    with torch.no_grad():
        log_prob = model.log_prob(torch.from_numpy(images)).double().numpy()
    for score, each, kept in zip(scores, log_prob, visible, strict=True):
        nats = -each[~kept_steps(model, kept)]
        assert score == pytest.approx(nats.mean() / math.log(2), rel=1e-5)


def test_models_of_any_order_have_their_own_score() -> None:
    spec = ImageSpec(4, 3, 1, 17)
    model = tiny_model(spec, embedding=NEIGHBOURHOOD, order="any")
    images = next(generate(model, 5, seed=2))
    region = read_region("random:0.4")
    visible = np.stack([region.visible(4, 3, 0, i) for i in range(5)])
    done: list[float] = []
    scores, reports = score_hidden(model, images, visible, 8, 2, done.append)
    assert not reports
    assert done == [2, 2, 1]
    with torch.no_grad():
        log_prob = model.log_prob(torch.from_numpy(images), visible=torch.from_numpy(visible))
    hidden = -log_prob[:, int(visible[0].sum()) :].flatten(1).mean(dim=1) / math.log(2)
    np.testing.assert_allclose(scores, hidden.numpy(), rtol=1e-5)


def test_evaluates_hidden_pixels(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluate(ckpt, "limit=5", "visible=left:0.5", "particles=20", f"out={tmp_path / 'a'}")
    assert json.loads((tmp_path / "a").read_text()) == result
    assert (result["visible"], result["kept"], result["particles"]) == ("left:0.5", 0.5, 20)
    assert result["standard_error"] > 0
    assert "bits_per_dim" not in result
    assert result["bits_per_hidden_value"] == pytest.approx(math.log2(17), abs=1)
    said = capsys.readouterr().out
    assert "bits per hidden value (visible=left:0.5, by 20 particles, " in said
    assert f"20 particles, {result['loop']}: too low rather than too high" in said
    whole = evaluate(ckpt, "limit=5", "visible=0")
    scores = score_images(tiny_model(Digits().spec), Digits().split("test").images[:5])
    assert whole["bits_per_hidden_value"] == pytest.approx(scores.mean(), rel=1e-5)
    assert whole["particles"] is None
    assert "(visible=0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["visible=all"], "visible=all, but it must be a share of the rows"),
        (["visible=[0.5,0.2]"], r"visible=\[0.5,0.2\], but it must be a share of the rows"),
        (["visible=left:0.5", "classify=true"], "visible and classify do not go together"),
        (["visible=left:0.5", "precision=32"], "visible and precision do not go together"),
        (["particles=9"], "particles=9 needs visible=; add it"),
        (["visible=0.5", "particles=9"], "particles=9 has no effect, because all that is kept"),
        (["visible='rectangle:[0,0,9,9]'"], "ends at row 9 and column 9, but the images have 8x8"),
    ],
)
def test_refusals(ckpt: Path, tmp_path: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        evaluate(ckpt, "limit=2", f"out={tmp_path / 'score.json'}", *overrides)
    assert not list(tmp_path.iterdir())
