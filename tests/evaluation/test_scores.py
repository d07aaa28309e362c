"""`imagegen evaluate`: the score, its error, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from imagegen.cli.entry import PROJECT_ROOT, compose
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.digits import Digits
from imagegen.evaluation.scores import run, score_images, standard_error
from imagegen.generation.decode.bf16 import why_not
from tests.helpers import save_tiny_checkpoint, tiny_model

CATEGORICAL = {"_target_": "imagegen.heads.categorical.Categorical"}


def evaluate(ckpt: Path, *overrides: str) -> dict[str, Any]:
    return run(compose("evaluate", [f"ckpt={ckpt}", *overrides]))


def random_images(n: int, spec: ImageSpec) -> np.ndarray:
    values = np.random.default_rng(0).integers(0, spec.levels, (n, *spec.shape))
    return values.astype(np.uint8)


@pytest.mark.parametrize("spec", [ImageSpec(8, 8, 1, 17), ImageSpec(3, 5, 3, 256)])
def test_a_uniform_model_scores_log2_of_the_levels(spec: ImageSpec) -> None:
    model = tiny_model(spec, head=CATEGORICAL)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.zero_()
    scores = score_images(model, random_images(5, spec))
    np.testing.assert_allclose(scores, math.log2(spec.levels), rtol=1e-6)


def test_scores_are_of_images_not_of_batches() -> None:
    spec = ImageSpec(8, 8, 1, 17)
    model = tiny_model(spec)
    images = random_images(11, spec)
    done: list[float] = []
    scores = score_images(model, images, batch_size=4, progress=done.append)
    assert scores.shape == (11,)
    assert scores.dtype == np.float64
    assert done == [4, 4, 3]
    assert scores.std() > 0.01
    for batch_size in (1, 11, 100, None):
        np.testing.assert_allclose(score_images(model, images, batch_size), scores, rtol=1e-5)
    log_prob = model.log_prob(torch.from_numpy(images)).double().sum(dim=(1, 2)).detach()
    np.testing.assert_allclose(scores, -log_prob.numpy() / (spec.dims * math.log(2)), rtol=1e-5)


def test_scores_as_drawn(ckpt: Path, tmp_path: Path) -> None:
    expected = evaluate(ckpt, "limit=30")["bits_per_dim"]
    tolerances = {"32": 1e-5, "int16": 1e-3, "auto": 1e-3, "int8": 5e-3, "bf16": 5e-3}
    if why_not() is not None:
        del tolerances["bf16"]
    for precision, tolerance in tolerances.items():
        result = evaluate(ckpt, "limit=30", f"precision={precision}")
        assert result["bits_per_dim"] == pytest.approx(expected, abs=tolerance)
        assert result["precision"] == precision
    local = {"_target_": "imagegen.attention.local.LocalAttention", "window": 4}
    path = save_tiny_checkpoint(tmp_path / "local.ckpt", attention=local)
    with pytest.raises(UserError, match="no loop for LocalAttention; leave precision out"):
        evaluate(path, "limit=3", "precision=32")


def test_scoring_switches_dropout_off_and_back_on() -> None:
    spec = ImageSpec(4, 4, 1, 17)
    model = tiny_model(spec, dropout=0.5).train()
    images = random_images(4, spec)
    first = score_images(model, images)
    np.testing.assert_array_equal(score_images(model, images), first)
    assert model.training


def test_a_diverged_model_is_refused() -> None:
    spec = ImageSpec(4, 4, 1, 17)
    model = tiny_model(spec)
    with torch.no_grad():
        next(model.head.parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match="image 0 as nan bits/dim, so its training must have div"):
        score_images(model, random_images(2, spec))


def test_standard_error() -> None:
    scores = np.array([1.0, 2.0, 4.0, 5.0])
    assert standard_error(scores) == pytest.approx(math.sqrt((4 + 1 + 1 + 4) / 3) / 2)
    assert standard_error(scores[:1]) is None


def test_writes_and_prints_what_it_found(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "score.json"
    result = evaluate(ckpt, "limit=50", f"out={out}", "batch_size=7")
    assert json.loads(out.read_text()) == result
    scores = score_images(tiny_model(Digits().spec), Digits().split("test").images[:50])
    assert result["bits_per_dim"] == pytest.approx(scores.mean(), rel=1e-5)
    assert result["standard_error"] == pytest.approx(scores.std(ddof=1) / math.sqrt(50), rel=1e-4)
    known = {
        "images": 50,
        "dims": 64,
        "dataset": "digits",
        "split": "test",
        "checkpoint": str(ckpt),
        "checkpoint_sha256": hashlib.sha256(ckpt.read_bytes()).hexdigest(),
        "torch_version": torch.__version__,
    }
    assert known.items() <= result.items()
    assert result["seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["score.json"]
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("\n") == 1
    assert f"{result['bits_per_dim']:.4f} ± {result['standard_error']:.4f} bits/dim" in printed.out
    assert "50 images of 64 dimensions (digits, test)" in printed.out


@pytest.mark.parametrize(("split", "images"), [("train", 1293), ("val", 144), ("test", 360)])
def test_whole_splits(ckpt: Path, split: str, images: int) -> None:
    result = evaluate(ckpt, f"split={split}")
    assert result["images"] == images
    assert result["split"] == split
    assert 2 < result["bits_per_dim"] < 12


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["split=all"], "split=all is unknown; it can be train, val, test"),
        (["precision=16"], "precision=16 is unknown; it can be auto, 32, bf16, int16, int8"),
        (["precision=auto", "classify=true"], "do not go together"),
        (["labels=false", "classify=true"], "do not go together"),
        (["out="], "out=, but it must be one path"),
        (["limit=0"], "limit=0, but it must be a whole number of at least 1"),
        (["batch_size=-1"], "batch_size=-1, but"),
        (["ckpt=null"], "ckpt is missing; add ckpt="),
        (["ckpt=nowhere"], "nowhere does not exist"),
        (["device=gpu"], "device=gpu is unknown"),
        (["dataset.root=x"], "Digits .*root"),
        (["out=."], "out|cannot write"),
        (["out=file/score.json"], "cannot write .*score.json"),
    ],
)
def test_refusals_leave_nothing(
    ckpt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=sentence):
        evaluate(ckpt, f"out={tmp_path / 'score.json'}", *overrides)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_data_set_may_lie_elsewhere(tmp_path: Path, shared_data: Path) -> None:
    mnist = {
        "_target_": "imagegen.data.mnist.MNIST",
        "root": str(tmp_path / "gone"),
        "download": False,
    }
    path = save_tiny_checkpoint(tmp_path / "tiny.ckpt", dataset=mnist)
    with pytest.raises(UserError, match=r"MNIST was not found: .*gone"):
        evaluate(path, "limit=2")
    assert evaluate(path, "limit=2", f"dataset.root={shared_data}")["images"] == 2


def test_other_images_than_the_models_are_refused(tmp_path: Path) -> None:
    path = save_tiny_checkpoint(tmp_path / "tiny.ckpt")
    content = torch.load(path, weights_only=True)
    content["imagegen"]["dataset"] = {"_target_": "imagegen.data.mnist.MNIST", "download": False}
    torch.save(content, path)
    with pytest.raises(
        UserError,
        match=r"mnist holds images of 28x28 pixels, 1 channel, 256 levels, but .* takes 8x8 pixels",
    ):
        evaluate(path)


def test_command_leaves_nothing_but_the_result(ckpt: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "imagegen", "evaluate", f"ckpt={ckpt}", "limit=3", "out=score.json"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(PROJECT_ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "bits/dim over 3 images" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["score.json"]
