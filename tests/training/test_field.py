"""Situations that users of other training programs have reported; benchmarks/results/field.md."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint

from imagegen.cli.entry import at_home
from imagegen.core.build import build_section
from imagegen.core.errors import UserError
from imagegen.data.image_folder import ImageFolder
from tests.helpers import SMALL, assert_refused, run_train


class Copies(Callback):
    """Keeps a copy of the run folder as a kill after the first validation would leave it."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        run = Path(trainer.default_root_dir)
        copy = run.with_name("killed")
        if trainer.fit_loop.batch_idx == 3 and not copy.exists():
            shutil.copytree(run, copy)


def _weights(run: Path) -> dict[str, torch.Tensor]:
    state = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert isinstance(state, dict)
    return state


def test_gradients_that_wait_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation between two batches of one step saves the first one's gradients."""
    run = tmp_path / "run"
    two = ["trainer.accumulate_grad_batches=2", "trainer.val_check_interval=3", "trainer.devices=1"]
    copies = "+callbacks.copies._target_=tests.training.test_field.Copies"
    assert run_train(monkeypatch, *SMALL, *two, copies, f"hydra.run.dir={run}") == 0
    killed = tmp_path / "killed"
    saved = torch.load(killed / "checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == 1
    assert saved["waiting_gradients"]
    assert run_train(monkeypatch, f"resume={killed}", copies) == 0
    whole, resumed = _weights(run), _weights(killed)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("+callbacks.best.save_weights_only=true", "imagegen export"),
        ("+callbacks.best.every_n_train_steps=1", "val/bits_per_dim of earlier weights"),
        ("+callbacks.best.train_time_interval=00:00:00:01", "of earlier weights"),
        ("+callbacks.best.save_last=link", "callbacks.last writes last.ckpt"),
        ("+callbacks.last.train_time_interval=1h", "days:hours:minutes:seconds"),
        ("callbacks.best.save_top_k=2", "+callbacks.best.save_top_k=2 passes it"),
        ("trainer.overfit_batches=1", "+trainer.overfit_batches=1 passes it"),
        ("trainer.devices=[0]", "the trainer rejects its settings"),
    ],
)
def test_refused_before_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    override: str,
    sentence: str,
) -> None:
    assert_refused(monkeypatch, capfd, tmp_path / "run", override, sentence)


def test_time_between_checkpoints() -> None:
    options = {"_target_": "pytorch_lightning.callbacks.ModelCheckpoint"}
    node = {**options, "train_time_interval": "00:00:30:00"}
    checkpoint = build_section(node, "callbacks.last", ModelCheckpoint)
    assert checkpoint._train_time_interval.total_seconds() == 1800


def test_a_run_made_anew_from_its_config_leaves_the_first_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """config.yaml holds the folders of its run, where the new run would write."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_train(monkeypatch, *SMALL, f"hydra.run.dir={first}") == 0
    before = (first / "checkpoints/best.ckpt").read_bytes()
    again = ["--config-dir", str(first), "--config-name", "config", f"hydra.run.dir={second}"]
    capfd.readouterr()
    assert run_train(monkeypatch, *again) == 1
    error = capfd.readouterr().err
    assert f"would replace {first / 'checkpoints/best.ckpt'}" in error
    assert (first / "checkpoints/best.ckpt").read_bytes() == before
    assert not (second / "checkpoints").exists()


def test_no_rows_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    options = ["trainer.log_every_n_steps=0", "callbacks=debug", "callbacks.grids=null"]
    assert run_train(monkeypatch, *SMALL, *options, f"hydra.run.dir={run}") == 0


def test_paths_are_those_of_the_folder_where_they_were_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for index in range(6):
        pixels = np.full((8, 8), index, dtype=np.uint8)
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / f"photos/{index}.png")
    data = ["dataset=image_folder", "dataset.root=photos", "dataset.size=8", "dataset.cache=cache"]
    options = [*data, "batch_size=2", "callbacks.grids=null", "trainer.max_epochs=1"]
    assert (
        run_train(monkeypatch, *SMALL, *options, "hydra.run.dir=run", "hydra.job.chdir=true") == 0
    )
    assert json.loads((tmp_path / "run/summary.json").read_text())["state"] == "finished"
    assert (tmp_path / "cache").is_dir()
    assert Path.cwd() == tmp_path


def test_the_limit_that_ended_a_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    limit = ["trainer.max_steps=3", "trainer.max_epochs=-1", "callbacks.grids=null"]
    assert run_train(monkeypatch, *SMALL, *limit, f"hydra.run.dir={run}") == 0
    capfd.readouterr()
    assert run_train(monkeypatch, f"resume={run}") == 1
    assert "for example trainer.max_steps=6." in capfd.readouterr().err
    assert run_train(monkeypatch, f"resume={run}", "trainer.max_steps=2") == 1
    assert "for example trainer.max_steps=6." in capfd.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("hydra.run.dir=~/runs/a", "hydra.run.dir=/my/folder/runs/a"),
        ("hydra.run.dir='~/runs (1)'", "hydra.run.dir='/my/folder/runs (1)'"),
        ("+dataset.root=~", "+dataset.root=/my/folder"),
        ("out=a~/b", "out=a~/b"),
        ("out=~other/b", "out=~other/b"),
        ("~callbacks.best", "~callbacks.best"),
        ("--help", "--help"),
    ],
)
def test_the_home_directory(monkeypatch: pytest.MonkeyPatch, typed: str, meant: str) -> None:
    monkeypatch.setenv("HOME", "/my/folder")
    assert at_home(typed) == meant


def test_class_folders_that_are_no_text(tmp_path: Path) -> None:
    for name in (b"cats", b"caf\xe9"):
        folder = os.path.join(os.fsencode(tmp_path), name)
        try:
            os.mkdir(folder)
        except OSError:
            pytest.skip("this file system takes text only")
        for index in range(3):
            pixels = np.full((8, 8), index, dtype=np.uint8)
            Image.fromarray(pixels).save(os.fsdecode(os.path.join(folder, b"%d.png" % index)))
    data = ImageFolder(tmp_path, size=8, cache=tmp_path / "cache")
    with pytest.raises(UserError, match=r"caf.*names a class but is not valid UTF-8"):
        data.prepare()
