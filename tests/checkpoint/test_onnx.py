"""`imagegen export format=onnx`: onnxruntime alone gives our parameters and images."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from imagegen.checkpoint import export
from imagegen.checkpoint.onnx import TOLERANCE, export_onnx, largest_difference
from imagegen.checkpoint.onnx_step import SingleStep
from imagegen.cli.entry import PROJECT_ROOT, compose
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.generation.sampling_loop import generate
from imagegen.model.transformer import ImageTransformer
from tests.helpers import TINY_MODEL, save_tiny_checkpoint, tiny_model

for _package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

CONF = PROJECT_ROOT / "conf"
DEFAULT = {
    "embedding": yaml.safe_load((CONF / "model/default.yaml").read_text())["embedding"],
}
ANY = {**DEFAULT, "order": "any", "linear_prediction": True}
PAPER = {"activation": "relu", "norm_first": False}
EVERYTHING = {
    **DEFAULT,
    "n_layers": 2,
    "tokens": "pixel",
    "n_classes": 3,
    "label_grid": 2,
    "flips": True,
    "convolution": [1, 1],
    "norm": "rms",
    "gated": True,
    "residual_scale": 0.5,
}
SOFTMAX_TOO = {**TINY_MODEL["head"], "categorical": True}
CATEGORICAL = {"_target_": "imagegen.heads.categorical.Categorical"}
GREY, COLOUR = ImageSpec(5, 7, 1, 17), ImageSpec(3, 4, 3, 256)


def attention(name: str, **options: Any) -> dict[str, Any]:
    config = yaml.safe_load((CONF / "attention" / f"{name}.yaml").read_text())
    return {"attention": {**config, **options}}


def spread(model: ImageTransformer) -> ImageTransformer:
    """With weights large enough for distributions that depend on what came before."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def example() -> ModuleType:
    path = PROJECT_ROOT / "examples" / "generate_onnx.py"
    spec = importlib.util.spec_from_file_location("generate_onnx", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        pytest.param(GREY, {**DEFAULT, "head": SOFTMAX_TOO}, id="default"),
        pytest.param(COLOUR, {**PAPER, "head": CATEGORICAL}, id="paper"),
        *(
            pytest.param(spec, options, id=name, marks=pytest.mark.slow)
            for name, spec, options in (
                ("colour", COLOUR, {**DEFAULT, "tokens": "pixel", "head": SOFTMAX_TOO}),
                ("everything", COLOUR, EVERYTHING),
                ("any order", COLOUR, {**ANY, "n_classes": 3, "label_grid": 2, "tokens": "pixel"}),
                ("flips", GREY, {"flips": True}),
                ("favor", GREY, attention("linear", feature_map="favor")),
                ("fourier", GREY, attention("linear", feature_map="fourier")),
                ("learned", GREY, attention("linear", feature_map="learned")),
                ("taylor2", GREY, attention("linear", feature_map="taylor2")),
                ("retention", GREY, attention("retention")),
                ("convolution", GREY, attention("retention", conv_size=3)),
                ("ssd", GREY, attention("ssd")),
                ("gla", GREY, attention("gla")),
                ("delta", GREY, attention("delta")),
                ("gated_delta", GREY, attention("gated_delta")),
                ("channel", GREY, attention("gated_delta", gate="channel")),
                ("local", GREY, attention("local", window=6)),
                ("hybrid", GREY, attention("hybrid", pattern=["linear", "local"])),
            )
        ),
    ],
)
def test_the_parameters_and_images_are_ours(
    tmp_path: Path, spec: ImageSpec, options: dict[str, Any]
) -> None:
    model = spread(tiny_model(spec, **options))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    out = tmp_path / "model.onnx"
    error = export_onnx(model, out)
    assert error <= 2e-5
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    # Another batch size than the one that was traced, from another seed of images.
    images = example().generate(out, 5, seed=3)
    np.testing.assert_array_equal(images, next(generate(model, 5, seed=3)))
    if model.n_classes is not None:
        labelled = example().generate(out, 5, seed=3, label=2)
        np.testing.assert_array_equal(labelled, next(generate(model, 5, seed=3, labels=[2])))
        assert (labelled != images).any()
    assert len(np.unique(images)) > 5


def test_a_region_is_completed_from_its_canvas(tmp_path: Path) -> None:
    """What the docstring of `imagegen.checkpoint.onnx` says of models of any order."""
    import onnxruntime

    model = spread(tiny_model(GREY, **ANY))
    out = tmp_path / "any.onnx"
    export_onnx(model, out)
    session = onnxruntime.InferenceSession(out)
    random = np.random.default_rng(0)
    visible = random.random((2, *GREY.shape[:2])) < 0.4
    images = random.integers(0, GREY.levels, (2, *GREY.shape)).astype(np.uint8)
    places = np.argsort(~visible.reshape(2, -1), axis=1, kind="stable")
    steps = np.arange(GREY.dims)
    sequence = np.take_along_axis(images.reshape(2, -1), places, axis=1)[..., None]
    regions = torch.from_numpy(visible)
    with torch.no_grad():
        expected = model.parameters_of(torch.from_numpy(sequence), visible=regions).numpy()
    types = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int64)": np.int64}
    first = json.loads(session.get_modelmeta().custom_metadata_map["initial_state"])
    state = {
        entry.name: np.full((2, *entry.shape[1:]), first[entry.name], types[entry.type])
        for entry in session.get_inputs()
        if entry.name in first
    }
    state["canvas.kept"] = visible.reshape(2, -1).sum(axis=1)
    state["canvas.place_shift"] = places - steps
    state["canvas.rank_shift"] = np.argsort(places, axis=1) - steps
    names = [entry.name for entry in session.get_outputs()]
    token = np.zeros((2, 1), np.int64)
    for position in range(GREY.dims):
        feed = {"token": token, "position": np.array(position), **state}
        found = dict(zip(names, session.run(names, feed), strict=True))
        np.testing.assert_allclose(found["parameters"], expected[:, position], atol=2e-5)
        state = {name: found[f"next.{name}"] for name in state}
        token = sequence[:, position].astype(np.int64)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageTransformer, Path]:
    model = tiny_model(GREY, **attention("linear", feature_map="favor"))
    out = tmp_path_factory.mktemp("onnx") / "model.onnx"
    export_onnx(model, out)
    return model, out


def test_says_what_a_program_has_to_know(exported: tuple[ImageTransformer, Path]) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(exported[1])
    facts = session.get_modelmeta().custom_metadata_map
    known = {"height": "5", "width": "7", "channels": "1", "levels": "17", "steps": "35"}
    known |= {"values_per_step": "1", "uniforms_per_step": "2", "n_classes": "0"}
    known |= {"head": "mixture_of_logistics", "n_mixtures": "2", "categorical": "0"}
    assert known.items() <= facts.items()
    inputs = {entry.name: (entry.type, entry.shape) for entry in session.get_inputs()}
    assert inputs == {
        "token": ("tensor(int64)", ["batch", 1]),
        "position": ("tensor(int64)", []),
        "recent": ("tensor(uint8)", ["batch", 1, 1]),
        "layers.0.s": ("tensor(float)", ["batch", 2, 17, 8]),
        "layers.0.z": ("tensor(float)", ["batch", 2, 17]),
        "layers.0.scale": ("tensor(float)", ["batch", 2]),
    }
    outputs = {entry.name: entry.shape for entry in session.get_outputs()}
    assert outputs == {
        "parameters": ["batch", 6],
        **{
            f"next.{name}": shape
            for name, (_, shape) in inputs.items()
            if shape[1:] and name[0] != "t"
        },
    }
    initial = json.loads(facts["initial_state"])
    lowest = float(torch.finfo(torch.float32).min)
    assert initial == {"recent": 0, "layers.0.s": 0, "layers.0.z": 0, "layers.0.scale": lowest}


@pytest.mark.parametrize("name", ["softmax", "lsh", "strided", "hybrid"])
def test_growing_states_are_refused(tmp_path: Path, name: str) -> None:
    ckpt = save_tiny_checkpoint(tmp_path / "best.ckpt", n_layers=3, **attention(name))
    with pytest.raises(UserError, match=r"attention keeps all earlier positions.*attention=linear"):
        export.run(compose("export", [f"ckpt={ckpt}", "format=onnx", f"out={tmp_path}/m.onnx"]))
    assert [path.name for path in tmp_path.iterdir()] == ["best.ckpt"]


def test_a_file_that_computes_something_else_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imagegen.checkpoint.onnx._exported", lambda step: b"")
    monkeypatch.setattr("imagegen.checkpoint.onnx.largest_difference", lambda model, content: 0.5)
    with pytest.raises(UserError, match=r"differ by 0\.5 from the model's, more than 0\.001"):
        export_onnx(tiny_model(GREY), tmp_path / "model.onnx")
    monkeypatch.setattr(
        "imagegen.checkpoint.onnx.largest_difference", lambda model, content: float("nan")
    )
    with pytest.raises(UserError, match="differ by nan"):
        export_onnx(tiny_model(GREY), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_difference_is_measured(exported: tuple[ImageTransformer, Path]) -> None:
    model, content = copy.deepcopy(exported[0]), exported[1].read_bytes()
    assert largest_difference(model, content) < TOLERANCE
    with torch.no_grad():
        list(model.head.parameters())[-1].add_(0.1)
    assert largest_difference(model, content) > TOLERANCE


def test_tells_nothing_of_this_machine(exported: tuple[ImageTransformer, Path]) -> None:
    content = exported[1].read_bytes()
    assert b"imagegen" in content
    assert str(PROJECT_ROOT).encode() not in content
    assert b".py" not in content


def test_the_first_step_ignores_the_token() -> None:
    step = SingleStep(tiny_model(GREY, **DEFAULT))
    token, position, *state = step.inputs(2).values()
    with torch.no_grad():
        expected = step.model.step(None, step.model.initial_state(2))[0]
        for value in (0, 16):
            found = step(torch.full_like(token, value), position, [t.clone() for t in state])[0]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_command_and_the_example(tmp_path: Path) -> None:
    ckpt = save_tiny_checkpoint(tmp_path / "run" / "best.ckpt", **TINY_MODEL)
    environment = {"PYTHONPATH": str(PROJECT_ROOT), "PATH": "", "OMP_NUM_THREADS": "1"}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *argv],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    done = run("-m", "imagegen", "export", f"ckpt={ckpt}", "format=onnx", "out=model.onnx")
    assert (done.returncode, done.stderr) == (0, "")
    assert "onnxruntime gives the same parameters to within" in done.stdout
    script = str(PROJECT_ROOT / "examples" / "generate_onnx.py")
    done = run(script, "model.onnx", "grid.pgm", "--n", "5", "--seed", "1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "5 images: grid.pgm\n", "")
    grid = (tmp_path / "grid.pgm").read_bytes()
    assert grid.startswith(b"P5 24 16 255\n")
    assert len(grid) == len(b"P5 24 16 255\n") + 24 * 16


def test_the_example_stands_alone() -> None:
    text = (PROJECT_ROOT / "examples" / "generate_onnx.py").read_text()
    imported = [
        line.split()[1] for line in text.splitlines() if line.startswith(("import", "from"))
    ]
    assert set(imported) == {"__future__", "argparse", "json", "pathlib", "numpy", "onnxruntime"}
