from __future__ import annotations

import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from imagegen.checkpoint.reading import (
    FORMAT_VERSION,
    KEY,
    load_checkpoint,
    read_metadata,
    read_resume_state,
    resolve_checkpoint,
)
from imagegen.core.errors import UserError
from tests.helpers import save_tiny_checkpoint


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "run/checkpoints/best.ckpt")


class Boom:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def _change(path: Path, **changes: Any) -> Path:
    content = torch.load(path, weights_only=True)
    content[KEY] = {**content[KEY], **changes}
    torch.save(content, path)
    return path


def test_a_run_folder_means_its_best_then_its_last(ckpt: Path, tmp_path: Path) -> None:
    assert resolve_checkpoint(ckpt.parents[1]) == ckpt
    assert resolve_checkpoint(str(ckpt)) == ckpt
    last = ckpt.rename(ckpt.with_name("last.ckpt"))
    assert resolve_checkpoint(tmp_path / "run") == last
    last.unlink()
    with pytest.raises(UserError, match=r"holds no checkpoints/best\.ckpt"):
        resolve_checkpoint(tmp_path / "run")
    with pytest.raises(UserError, match="does not exist"):
        resolve_checkpoint(tmp_path / "nothing")


def test_a_model_comes_back_ready_to_draw(ckpt: Path) -> None:
    loaded = load_checkpoint(ckpt)
    weights = torch.load(ckpt, weights_only=True)["state_dict"]
    assert not loaded.model.training
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, weights[f"model.{name}"])
    assert loaded.metadata["spec"] == {"height": 8, "width": 8, "channels": 1, "levels": 17}


def test_resume_state_has_the_step_and_the_logger(ckpt: Path) -> None:
    content = torch.load(ckpt, weights_only=True)
    content["global_step"] = 7
    content[KEY]["logger"] = {"wandb_id": "abc"}
    torch.save(content, ckpt)
    state = read_resume_state(ckpt)
    assert (state["step"], state["wandb_id"]) == (7, "abc")


def test_loading_never_runs_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    torch.save({KEY: Boom(marker), "state_dict": {}}, tmp_path / "hostile.ckpt")
    (tmp_path / "pickle.ckpt").write_bytes(pickle.dumps(Boom(marker)))
    for name in ("hostile.ckpt", "pickle.ckpt"):
        with pytest.raises(UserError, match="not a checkpoint of imagegen"):
            load_checkpoint(tmp_path / name)
    assert not marker.exists()


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.Popen",
        "imagegen.cli.entry.os",
        "imagegen.attention.linear.LinearState",
        "imagegen.attention.nothing.Nothing",
        "tests.helpers.Nothing",
        "imagegen.attention.linear",
        None,
        7,
    ],
)
def test_foreign_classes_are_refused(ckpt: Path, target: object) -> None:
    model = torch.load(ckpt, weights_only=True)[KEY]["model"]
    _change(ckpt, model={**model, "attention": {"_target_": target}})
    with pytest.raises(UserError, match="is not one of imagegen's CausalAttention classes"):
        load_checkpoint(ckpt)


def test_foreign_modules_are_not_even_imported(
    ckpt: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "intruder.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = torch.load(ckpt, weights_only=True)[KEY]["model"]
    _change(ckpt, model={**model, "head": {"_target_": "intruder.Head"}})
    with pytest.raises(UserError, match="not one of imagegen's OutputHead"):
        load_checkpoint(ckpt)
    assert "intruder" not in sys.modules


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_truncated_files_are_named(ckpt: Path, share: float) -> None:
    content = ckpt.read_bytes()
    ckpt.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UserError, match=r"best\.ckpt is truncated or damaged"):
        load_checkpoint(ckpt)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    (tmp_path / "empty.ckpt").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "zip.ckpt", "w") as archive:
        archive.writestr("a", "b")
    torch.save({"state_dict": {}}, tmp_path / "lightning.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    for path in tmp_path.glob("*.ckpt"):
        with pytest.raises(UserError, match=f"{path.name} is not a checkpoint of imagegen"):
            load_checkpoint(path)


def test_changed_checkpoints_are_refused(ckpt: Path) -> None:
    model = torch.load(ckpt, weights_only=True)[KEY]["model"]
    for changes, sentence in (
        ({"format_version": FORMAT_VERSION + 1}, "newer than the 1 that this version reads"),
        ({"model": {**model, "n_layers": 2}}, "do not fit the model that it describes"),
        ({"model": {**model, "n_layers": 1, "wings": 2}}, "unknown wings"),
        ({"model": {"n_layers": 1}}, "missing attention, head"),
        ({"model": model, "spec": {"height": 8}}, "image spec must have"),
        ({"model": model, "spec": {"height": 1 << 20, "width": 1 << 20}}, "at most"),
    ):
        _change(ckpt, **changes)
        with pytest.raises(UserError, match=sentence):
            load_checkpoint(ckpt)
        _change(ckpt, format_version=FORMAT_VERSION, model=model)


def test_a_lacking_entry_is_named(ckpt: Path) -> None:
    content = torch.load(ckpt, weights_only=True)
    del content[KEY]["dataset"]
    torch.save(content, ckpt)
    with pytest.raises(UserError, match="lacks dataset"):
        read_metadata(ckpt)
