"""`imagegen export format=safetensors`: what is written, and read like a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from imagegen.checkpoint.export import run
from imagegen.checkpoint.reading import (
    load_checkpoint,
    read_metadata,
    read_resume_state,
    resolve_checkpoint,
)
from imagegen.checkpoint.weights_folder import write_weights_folder
from imagegen.cli.entry import compose
from imagegen.core.errors import UserError
from imagegen.evaluation import scores as evaluate
from tests.helpers import read_images, sample, save_tiny_checkpoint, tree

FAVOR = {"_target_": "imagegen.attention.linear.LinearAttention", "feature_map": "favor"}


def export(ckpt: Path, out: object, *overrides: str) -> Path:
    return run(compose("export", [f"ckpt={ckpt}", f"out={out}", *overrides]))


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "run/checkpoints/best.ckpt", attention=FAVOR)


def test_holds_the_weights_and_the_description(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = export(ckpt.parents[1], tmp_path / "new" / "export")
    assert tree(out) == {"model.safetensors", "config.json"}
    printed = capsys.readouterr().out
    model = load_checkpoint(ckpt).model
    count = sum(tensor.numel() for tensor in model.state_dict().values())
    assert printed == f"{count:,} weights of {ckpt}: {out}\n"

    from safetensors import safe_open

    with safe_open(out / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        names = set(file.keys())
        for name, wanted in model.state_dict().items():
            np.testing.assert_array_equal(file.get_tensor(name), wanted.numpy())
    assert names == set(model.state_dict())
    assert json.loads((out / "config.json").read_text()) == read_metadata(ckpt)


def test_is_taken_like_the_checkpoint(ckpt: Path, tmp_path: Path) -> None:
    out = export(ckpt, tmp_path / "export")
    assert resolve_checkpoint(out) == out / "model.safetensors"
    wanted = read_images(sample(ckpt, tmp_path / "a", "n=3"))
    for number, path in enumerate((out, out / "model.safetensors")):
        found = read_images(sample(path, tmp_path / str(number), "n=3"))
        assert found.keys() == wanted.keys()
        for name, image in wanted.items():
            np.testing.assert_array_equal(found[name], image)
    manifest = json.loads((tmp_path / "0" / "manifest.json").read_text())
    assert manifest["checkpoint"] == str(out / "model.safetensors")
    done = read_images(sample(out, tmp_path / "c", "task=complete", "n=1", "completions=1"))
    assert set(done) == {"00000-original.png", "00000-1.png"}
    scores = [
        evaluate.run(compose("evaluate", [f"ckpt={path}", "limit=5"]))["bits_per_dim"]
        for path in (ckpt, out)
    ]
    assert scores[0] == scores[1]
    # An export of an export is the same again.
    again = export(out, tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (out / name).read_bytes()


def test_an_earlier_export_is_replaced_and_nothing_else(ckpt: Path, tmp_path: Path) -> None:
    out = export(ckpt, tmp_path / "export")
    other = save_tiny_checkpoint(tmp_path / "other.ckpt", seed=1, attention=FAVOR)
    export(other, out)
    weights = load_checkpoint(other).model.state_dict()
    for name, tensor in load_checkpoint(out).model.state_dict().items():
        assert torch.equal(tensor, weights[name])
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds other files \(thesis\.txt\)"):
        export(ckpt, out)
    assert tree(out) == {"model.safetensors", "config.json", "thesis.txt"}


def test_both_files_or_none(ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"cannot write .*no space left"):
        write_weights_folder(tmp_path / "export", {}, {"a": torch.ones(1)})
    assert tree(tmp_path) == {"run", "run/checkpoints", "run/checkpoints/best.ckpt"}


def test_a_missing_half_is_named(ckpt: Path, tmp_path: Path) -> None:
    out = export(ckpt, tmp_path / "export")
    (out / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"model\.safetensors needs the config\.json that was expo"):
        load_checkpoint(out)
    (tmp_path / "config.json").rename(out / "config.json")
    (out / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds config\.json, but not the model\.safetensors"):
        load_checkpoint(out)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_truncated_weights_are_named(ckpt: Path, tmp_path: Path, share: float) -> None:
    weights = export(ckpt, tmp_path / "export") / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated or damaged"):
        load_checkpoint(weights)


def test_weights_of_another_model_are_refused(ckpt: Path, tmp_path: Path) -> None:
    out = export(ckpt, tmp_path / "export")
    other = save_tiny_checkpoint(tmp_path / "other.ckpt", d_ff=32)
    (export(other, tmp_path / "other") / "model.safetensors").replace(out / "model.safetensors")
    with pytest.raises(UserError, match="do not fit the model that it describes"):
        load_checkpoint(out)


def test_training_does_not_go_on_from_it(ckpt: Path, tmp_path: Path) -> None:
    out = export(ckpt, tmp_path / "export")
    with pytest.raises(UserError, match="holds weights only, so no training can continue from it"):
        read_resume_state(out / "model.safetensors")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["out=null"], "out is missing; add out=<folder>"),
        (["out=null", "format=onnx"], r"out is missing; add out=<file\.onnx>"),
        (["out=model.safetensors"], r"names a file, but format=safetensors writes a folder"),
        (["format=onnx"], r"must be a file that ends in \.onnx"),
        (["format=pickle"], "format=pickle is unknown; it can be safetensors, onnx"),
        (["ckpt=null"], "ckpt is missing"),
        (["ckpt=nowhere"], "nowhere does not exist"),
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
    with pytest.raises(UserError, match=sentence):
        export(ckpt, tmp_path / "export", *overrides)
    assert tree(tmp_path) == {"run", "run/checkpoints", "run/checkpoints/best.ckpt"}


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_package_that_is_not_installed(
    ckpt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    out = tmp_path / "model.onnx"
    with pytest.raises(UserError, match=r"is not installed; type `pip install -e '\.\[onnx\]'"):
        export(ckpt, out, "format=onnx")
    assert not out.exists()


def test_half_the_size(ckpt: Path, tmp_path: Path) -> None:
    out = export(ckpt, tmp_path / "export", "dtype=float16")
    exact = load_checkpoint(ckpt).model.state_dict()
    for name, tensor in load_checkpoint(out).model.state_dict().items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, exact[name], rtol=2**-11, atol=2**-24)
    size = (out / "model.safetensors").stat().st_size
    whole = (export(ckpt, tmp_path / "whole") / "model.safetensors").stat().st_size
    assert size < 0.7 * whole  # names take their part


def test_a_weight_beyond_float16(tmp_path: Path) -> None:
    path = save_tiny_checkpoint(tmp_path / "best.ckpt")
    content = torch.load(path, weights_only=True)
    name = next(name for name in content["state_dict"] if name.endswith("norm.weight"))
    content["state_dict"][name] += 70_000
    torch.save(content, path)
    with pytest.raises(UserError, match="beyond float16; leave dtype=float16 out"):
        export(path, tmp_path / "export", "dtype=float16")
    assert tree(tmp_path) == {"best.ckpt"}


def test_without_the_folders_of_this_machine(ckpt: Path, tmp_path: Path) -> None:
    content = torch.load(ckpt, weights_only=True)
    metadata = content["imagegen"]
    metadata["dataset"]["root"] = str(tmp_path / "data")
    metadata["overrides"] = ["seed=1", f"dataset.root={tmp_path}"]
    torch.save(content, ckpt)
    kept = export(ckpt, tmp_path / "kept")
    assert str(tmp_path) in (kept / "config.json").read_text()
    out = export(ckpt, tmp_path / "export", "folders=false")
    assert str(tmp_path) not in (out / "config.json").read_text()
    found = read_metadata(out / "model.safetensors")
    assert found["overrides"] == ["seed=1"]
    assert found["dataset"]["root"] is None
    assert found["model"] == metadata["model"]


@pytest.mark.parametrize("override", ["dtype=float16", "folders=false"])
def test_onnx_files_have_neither(ckpt: Path, tmp_path: Path, override: str) -> None:
    with pytest.raises(UserError, match="are for format=safetensors; leave them out"):
        export(ckpt, tmp_path / "model.onnx", "format=onnx", override)
