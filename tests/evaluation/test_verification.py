"""`imagegen verify`: sound models pass, each check fails on a model made for it."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from imagegen.attention.linear import LinearAttention
from imagegen.attention.softmax import SoftmaxAttention
from imagegen.cli.entry import PROJECT_ROOT, compose
from imagegen.commands import verify as verify_command
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.evaluation import verification as verify
from imagegen.evaluation.checks import (
    BATCH,
    CAUSALITY,
    FORMS_32,
    FORMS_64,
    NORMALIZER,
    SAMPLER,
    STATE,
    SUM,
    WEIGHTS,
    all_checks,
    normalizers_stay_away_from_zero,
    p_value,
    sampler_draws_the_distribution,
)
from imagegen.heads.mixture_of_logistics import MixtureOfLogistics
from imagegen.model.transformer import ImageTransformer, ModelState
from tests.helpers import run_main, save_tiny_checkpoint, tiny_model

SPEC = ImageSpec(4, 5, 1, 17)
NAMES = [WEIGHTS, FORMS_64, FORMS_32, SUM, SAMPLER, CAUSALITY, NORMALIZER, BATCH, STATE]


def verdicts(model: ImageTransformer) -> dict[str, bool | None]:
    spec = model.spec
    images = np.random.default_rng(0).integers(0, spec.levels, (2, *spec.shape)).astype(np.uint8)
    return {check.name: check.ok for check in all_checks(model, images, seed=0)}


def target(name: str) -> dict[str, Any]:
    return {"attention": {"_target_": f"imagegen.attention.{name}"}}


@pytest.mark.parametrize(
    ("name", "growing"),
    [
        ("linear.LinearAttention", False),
        ("softmax.SoftmaxAttention", True),
        ("lsh.LSHAttention", True),
        ("local.LocalAttention", False),
        ("hybrid.HybridAttention", True),
    ],
)
def test_sound_models_pass(name: str, growing: bool) -> None:
    found = verdicts(tiny_model(SPEC, **{**target(name), "n_layers": 3}))
    assert list(found) == NAMES
    linear = "linear" in name or "hybrid" in name
    expected = {STATE: None if growing else True, NORMALIZER: True if linear else None}
    assert found == {**dict.fromkeys(NAMES, True), **expected}


def test_models_of_any_order_pass() -> None:
    embedding = {"_target_": "imagegen.model.embeddings.Neighbourhood"}
    model = tiny_model(SPEC, embedding=embedding, order="any", linear_prediction=True)
    assert verdicts(model) == dict.fromkeys(NAMES, True)


def pixels(levels: int = 256) -> ImageTransformer:
    """Of colour images, a pixel a step, with labels and a convolution."""
    embedding = {"_target_": "imagegen.model.embeddings.Neighbourhood"}
    options = {
        "n_classes": 3,
        "label_grid": 2,
        "flips": True,
        "convolution": [1, 1],
        "embedding": embedding,
    }
    return tiny_model(ImageSpec(3, 4, 3, levels), tokens="pixel", **options)


def test_sound_models_of_pixels_pass() -> None:
    assert verdicts(pixels()) == dict.fromkeys(NAMES, True)


def test_every_value_of_a_step_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pixels(levels=32)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.mul_(3)
    images = np.random.default_rng(0).integers(0, 32, (1, *model.spec.shape)).astype(np.uint8)
    sequence = model.raster.to_sequence(torch.from_numpy(images))
    with torch.inference_mode():
        assert sampler_draws_the_distribution(model, sequence, seed=0).ok
    draw = MixtureOfLogistics._draw

    def independent(self: MixtureOfLogistics, *args: Any) -> Tensor:
        drawn = draw(self, *args)
        return torch.cat([drawn[:, :2], drawn[:, 2:].roll(1, dims=0)], dim=1)

    monkeypatch.setattr(MixtureOfLogistics, "_draw", independent)
    with torch.inference_mode():
        assert sampler_draws_the_distribution(model, sequence, seed=0).ok is False


def test_checks_leave_the_model_alone() -> None:
    model = tiny_model(SPEC)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    verdicts(model)
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    attention = model.blocks[0].attention
    assert isinstance(attention, LinearAttention)
    assert attention.normalizer_observer is None
    assert not model.training


def _nan_weight(model: ImageTransformer, patch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        model.blocks[0].norm1.weight[3] = torch.nan  # type: ignore[index]


def _louder_step(model: ImageTransformer, patch: pytest.MonkeyPatch) -> None:
    step = LinearAttention.step
    patch.setattr(
        LinearAttention, "step", lambda self, x, state: (step(self, x, state)[0] * 1.5, state)
    )


def _extra_mass(model: ImageTransformer, patch: pytest.MonkeyPatch) -> None:
    log_mass = MixtureOfLogistics._log_mass
    patch.setattr(MixtureOfLogistics, "_log_mass", lambda *args: log_mass(*args) + 0.01)


def _shifted_draws(model: ImageTransformer, patch: pytest.MonkeyPatch) -> None:
    draw = MixtureOfLogistics._draw

    def shifted(self: MixtureOfLogistics, *args: Any) -> Tensor:
        drawn = draw(self, *args)
        # What should be level 7 becomes level 8.
        return drawn + (drawn == 7)

    patch.setattr(MixtureOfLogistics, "_draw", shifted)


def _off_by_one(model: ImageTransformer, patch: pytest.MonkeyPatch) -> None:
    draw = MixtureOfLogistics._draw
    patch.setattr(
        MixtureOfLogistics, "_draw", lambda *args: (draw(*args) + 1).clamp(max=SPEC.levels - 1)
    )


def _next_seen(model: ImageTransformer, patch: pytest.MonkeyPatch) -> None:
    forward = LinearAttention.forward
    patch.setattr(
        LinearAttention, "forward", lambda self, x, *more: forward(self, x.roll(-1, 1), *more)
    )


def _forgetful(model: ImageTransformer, patch: pytest.MonkeyPatch) -> None:
    step = LinearAttention.step

    def forgetting(self: LinearAttention, x: Tensor, state: Any) -> Any:
        return step(self, x, self.initial_state(len(x)))

    patch.setattr(LinearAttention, "step", forgetting)


def _whole_mean(model: ImageTransformer, patch: pytest.MonkeyPatch) -> None:
    forward = LinearAttention.forward

    def seeing(self: LinearAttention, x: Tensor, state: Any = None) -> Any:
        y, state = forward(self, x, state)
        return y + 1e-6 * x.mean(dim=1, keepdim=True), state

    patch.setattr(LinearAttention, "forward", seeing)


def _tiny_features(model: ImageTransformer, patch: pytest.MonkeyPatch) -> None:
    attention = model.blocks[0].attention
    assert isinstance(attention, LinearAttention)
    with torch.no_grad():
        attention.qkv.bias[: 2 * 16] -= 12


def _crowded(model: ImageTransformer, patch: pytest.MonkeyPatch) -> None:
    step = ImageTransformer.step

    def crowded(self: ImageTransformer, values: Tensor | None, state: ModelState) -> Any:
        parameters, state = step(self, values, state)
        return parameters + len(parameters) / 16, state

    patch.setattr(ImageTransformer, "step", crowded)


def _longer_state(model: ImageTransformer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelState, "nbytes", property(lambda self: 100 + self.position))


@pytest.mark.parametrize(
    ("name", "breaking", "others"),
    [
        (WEIGHTS, _nan_weight, {FORMS_64, FORMS_32, SUM, SAMPLER, NORMALIZER}),
        (FORMS_64, _louder_step, {FORMS_32}),
        (FORMS_32, _louder_step, {FORMS_64}),
        (SUM, _extra_mass, {SAMPLER}),
        (SAMPLER, _shifted_draws, set()),
        (SAMPLER, _off_by_one, set()),
        (CAUSALITY, _whole_mean, {FORMS_64}),
        (CAUSALITY, _next_seen, {FORMS_64, FORMS_32}),
        (FORMS_64, _forgetful, {FORMS_32}),
        (NORMALIZER, _tiny_features, set()),
        (BATCH, _crowded, {FORMS_64, FORMS_32}),
        (STATE, _longer_state, set()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_check_fails_on_its_model(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    breaking: Callable[[ImageTransformer, pytest.MonkeyPatch], None],
    others: set[str],
) -> None:
    model = tiny_model(SPEC)
    breaking(model, monkeypatch)
    found = verdicts(model)
    assert found[name] is False
    assert {key for key, ok in found.items() if ok is False} - {name} <= others


@pytest.mark.parametrize(
    ("value", "count", "ok"),
    [(8e-6, 4, True), (8e-6, 5, False), (math.nan, 1, False), (math.inf, 1, False)],
)
def test_a_few_small_normalisers_are_let_pass(
    monkeypatch: pytest.MonkeyPatch, value: float, count: int, ok: bool
) -> None:
    model = tiny_model(SPEC, n_layers=1)
    attention = model.blocks[0].attention
    assert isinstance(attention, LinearAttention)
    normalizers = torch.ones(4000)
    normalizers[:count] = value

    def known(self: ImageTransformer, sequence: Tensor) -> None:
        assert attention.normalizer_observer is not None
        attention.normalizer_observer(normalizers)

    monkeypatch.setattr(ImageTransformer, "parameters_of", known)
    check = normalizers_stay_away_from_zero(model, torch.zeros(1, 20, 1, dtype=torch.uint8))
    assert check.ok is ok
    if math.isnan(value):
        assert check.figure.startswith("least nan")
    if value < 1:
        assert check.figure == f"least 8.0e-06, {count} of 4,000 under 1e-05"


def test_a_check_that_cannot_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(MixtureOfLogistics, "log_probabilities", broken)
    images = np.zeros((1, *SPEC.shape), np.uint8)
    found = {check.name: check for check in all_checks(tiny_model(SPEC), images, seed=0)}
    assert found[SUM].ok is False
    assert found[SUM].figure == "failed: no such kernel"
    assert found[FORMS_64].ok


def test_p_values() -> None:
    expected = torch.tensor([40.0, 30, 20, 6, 3, 1], dtype=torch.float64)
    assert p_value(expected, expected) == pytest.approx(1)
    # By hand: levels 4 and 5 join, and then 3.
    counts = torch.tensor([50.0, 25, 15, 5, 4, 1], dtype=torch.float64)
    statistic = 100 / 40 + 25 / 30 + 25 / 20 + 0
    scipy = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    joined = expected.clone()
    joined[4:] = torch.tensor([4.0, 0])
    assert p_value(counts, expected) == pytest.approx(scipy.chi2.sf(statistic, 3), rel=1e-9)
    assert p_value(counts, torch.full_like(counts, 1.0)) == 1
    assert p_value(counts, torch.full_like(counts, torch.nan)) == 0


def command(patch: pytest.MonkeyPatch, *argv: str) -> int:
    return run_main(patch, verify_command.main, "verify", *argv)


def test_the_command_prints_a_line_a_check(
    ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, f"ckpt={ckpt}", "out=result.json") == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    first, *lines, last = printed.out.splitlines()
    assert first == f"{ckpt}, 2 images: digits, test"
    assert [line[: len(name)] for line, name in zip(lines, NAMES, strict=True)] == NAMES
    assert all(line.split()[-1] == "ok" for line in lines)
    assert last == "all checks passed"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ok"] is True
    assert [check["name"] for check in result["checks"]] == NAMES
    assert result["checkpoint"] == str(ckpt)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_the_command_fails_where_a_check_does(
    ckpt: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _louder_step(tiny_model(SPEC), monkeypatch)
    assert command(monkeypatch, f"ckpt={ckpt}", "images=1") == 1
    printed = capfd.readouterr()
    assert printed.err == ""
    failed = [line for line in printed.out.splitlines() if line.endswith("FAIL")]
    assert failed[0].startswith(FORMS_64)
    assert printed.out.endswith(f"{len(failed)} of 9 checks failed\n")


def test_data_that_are_not_here_are_replaced(tmp_path: Path) -> None:
    mnist = {"_target_": "imagegen.data.mnist.MNIST", "root": str(tmp_path), "download": True}
    ckpt = save_tiny_checkpoint(tmp_path / "best.ckpt", dataset=mnist)
    metadata = torch.load(ckpt, weights_only=True)["imagegen"]
    model = tiny_model(ImageSpec(28, 28))
    images, origin = verify._images(model, metadata, {"root": None, "download": None}, 3)
    assert images.shape == (3, 28, 28, 1)
    assert images.max() > 250
    assert origin.startswith("random, because MNIST was not found")
    # What the user names has to be there.
    with pytest.raises(UserError, match="MNIST was not found"):
        verify._images(model, metadata, {"root": str(tmp_path / "elsewhere")}, 3)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["images=0"], "images=0, but it must be a whole number of at least 1"),
        (["seed=-1"], "seed=-1"),
        (["ckpt=nowhere"], "nowhere does not exist"),
        (["ckpt=null"], "ckpt is missing"),
    ],
)
def test_refusals(ckpt: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        verify.run(compose("verify", [f"ckpt={ckpt}", *overrides]))


def test_growing_mechanisms_are_known() -> None:
    model = tiny_model(SPEC, **target("softmax.SoftmaxAttention"))
    state = model.initial_state(1)
    after = model.step(None, dataclasses.replace(state))[1]
    assert after.nbytes > state.nbytes
    assert isinstance(model.blocks[0].attention, SoftmaxAttention)


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, imagegen.checkpoint.export, imagegen.evaluation.verification;"
        "print({'torch', 'onnx', 'safetensors', 'lightning'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PROJECT_ROOT,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")
