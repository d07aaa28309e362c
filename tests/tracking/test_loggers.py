"""metrics.csv, wandb and TensorBoard."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import Logger
from torch.utils.data import DataLoader, TensorDataset

from imagegen.cli.entry import PROJECT_ROOT
from imagegen.core.errors import UserError
from imagegen.tracking.loggers import (
    build_loggers,
    check_logger,
    close_loggers,
    log_images,
    logger_state,
)
from imagegen.tracking.metrics_file import MetricsFile
from tests.helpers import WANDB, read_wandb

TENSORBOARD = {"_target_": "imagegen.tracking.loggers.tensorboard_logger"}
CONFIG = {"dataset": {"_target_": "imagegen.data.digits.Digits"}, "seed": 3}


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def steps(folder: Path) -> list[int]:
    return [int(row["step"]) for row in rows(folder)]


class TestMetricsFile:
    def test_one_row_a_step_readable_at_once(self, tmp_path: Path) -> None:
        logger = MetricsFile(tmp_path)
        logger.log_metrics({"loss": torch.tensor(2.5)}, 0)
        assert rows(tmp_path) == [{"step": "0", "loss": "2.5"}]
        logger.log_metrics({"loss": 2.0}, 10)
        logger.log_metrics({"lr": 0.1}, 10)
        logger.log_metrics({"loss": 1.0, "lr": 0.2}, 20)
        logger.log_metrics({"loss": 1.5}, 20)
        assert rows(tmp_path) == [
            {"step": "0", "loss": "2.5", "lr": ""},
            {"step": "10", "loss": "2.0", "lr": "0.1"},
            {"step": "20", "loss": "1.5", "lr": "0.2"},
        ]
        logger.finalize("success")
        logger.log_metrics({"loss": 0.5}, 30)
        assert steps(tmp_path) == [0, 10, 20, 30]
        logger.finalize("success")

    def test_resuming_drops_what_comes_again(self, tmp_path: Path) -> None:
        first = MetricsFile(tmp_path)
        for step in (9, 19, 29, 39):
            first.log_metrics({"loss": step}, step)
        first.finalize("failed")
        with open(tmp_path / "metrics.csv", "a") as file:
            file.write("49,")  # killed while it wrote
        second = MetricsFile(tmp_path, resume_step=30)
        second.log_metrics({"val/loss": 1}, 39)
        second.finalize("success")
        assert rows(tmp_path) == [
            {"step": "9", "loss": "9", "val/loss": ""},
            {"step": "19", "loss": "19", "val/loss": ""},
            {"step": "29", "loss": "29", "val/loss": ""},
            {"step": "39", "loss": "", "val/loss": "1"},
        ]

    def test_resuming_into_an_empty_folder(self, tmp_path: Path) -> None:
        logger = MetricsFile(tmp_path, resume_step=30)
        logger.log_metrics({"loss": 1}, 30)
        logger.finalize("success")
        assert steps(tmp_path) == [30]

    def test_only_the_first_process_writes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from lightning_utilities.core.rank_zero import rank_zero_only

        monkeypatch.setattr(rank_zero_only, "rank", 1)
        monkeypatch.setenv("RANK", "1")
        for logger in build_loggers(WANDB, tmp_path, CONFIG):
            logger.log_metrics({"loss": 1}, 0)
        close_loggers(build_loggers(None, tmp_path, CONFIG))
        assert list(tmp_path.iterdir()) == []


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("val/loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_lightning_resumes_without_gap_or_repeat(tmp_path: Path) -> None:
    def fit(epochs: int, checkpoint: Path | None, step: int | None) -> None:
        data = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
        saved = ModelCheckpoint(tmp_path / "ckpt", filename="{step}", save_top_k=-1)
        loggers: list[Logger] = build_loggers(
            None, tmp_path, {}, {"step": step} if step is not None else None
        )
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=loggers,
            callbacks=[saved, LearningRateMonitor("step")],
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Line(), data, data, ckpt_path=checkpoint)
        close_loggers(loggers)

    fit(3, None, None)
    whole = rows(tmp_path)
    assert steps(tmp_path) == list(range(12))
    assert [row["step"] for row in whole if row["val/loss"]] == ["3", "7", "11"]
    checkpoint = tmp_path / "ckpt" / "step=8.ckpt"
    step = torch.load(checkpoint, weights_only=True)["global_step"]
    fit(4, checkpoint, step)
    assert steps(tmp_path) == list(range(16))
    assert rows(tmp_path)[:8] == whole[:8]


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)


@pytest.mark.parametrize("options", [None, {}, {"_target_": None}])
def test_without_further_loggers(tmp_path: Path, options: Any, pixels: np.ndarray) -> None:
    loggers = build_loggers(options, tmp_path, CONFIG)
    assert [type(logger) for logger in loggers] == [MetricsFile]
    log_images(loggers, "samples", pixels, 3)
    assert logger_state(loggers) == {}
    close_loggers(loggers)
    assert list(tmp_path.iterdir()) == []


class TestWandb:
    @pytest.fixture(autouse=True)
    def _no_login(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_SILENT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        yield
        import wandb

        assert wandb.run is None

    def test_offline_run_holds_everything(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], pixels: np.ndarray
    ) -> None:
        run_dir = tmp_path / "a run"
        run_dir.mkdir()
        loggers = build_loggers(WANDB, run_dir, CONFIG)
        out, err = capfd.readouterr()
        assert err == ""
        assert out.count("\n") == 1
        assert "no login found, so this run is kept offline" in out
        for step in (0, 10):
            for logger in loggers:
                logger.log_metrics({"loss": 0.5 + step}, step)
        log_images(loggers, "val/samples", pixels, 11)
        log_images(loggers, "val/grey", pixels[..., :1], 11)
        state = logger_state(loggers)
        close_loggers(loggers)
        assert capfd.readouterr() == ("", "")

        (folder,) = (run_dir / "wandb").glob("offline-run-*")
        assert f"wandb sync {folder}" in out.replace("'", "")
        assert folder.name.endswith(state["wandb_id"])
        (colour,) = folder.glob("files/media/images/val/samples_*.png")
        assert np.array_equal(np.asarray(Image.open(colour)), pixels)
        (grey,) = folder.glob("files/media/images/val/grey_*.png")
        assert np.array_equal(np.asarray(Image.open(grey)), pixels[..., 0])
        config, history = read_wandb(folder)
        assert config["dataset"] == CONFIG["dataset"]
        assert config["seed"] == 3
        losses = {h["trainer/global_step"]: h["loss"] for h in history if "loss" in h}
        assert losses == {0: 0.5, 10: 10.5}
        assert steps(run_dir) == [0, 10]

    def test_resuming_keeps_the_run(self, tmp_path: Path) -> None:
        first = build_loggers(WANDB, tmp_path, CONFIG)
        state = logger_state(first)
        close_loggers(first, success=False)
        changed = {**CONFIG, "seed": 4}
        second = build_loggers(WANDB, tmp_path, changed, {"step": 5, **state})
        assert logger_state(second) == state
        close_loggers(second)
        folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
        assert len(folders) == 2
        assert all(state["wandb_id"] in folder.name for folder in folders)
        # It is told what has changed.
        assert [read_wandb(folder)[0]["seed"] for folder in folders] == [3, 4]

    def test_mode_of_the_environment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("WANDB_MODE", "disabled")
        loggers = build_loggers(WANDB, tmp_path, CONFIG)
        log_images(loggers, "samples", np.zeros((2, 2, 3), np.uint8), 0)
        close_loggers(loggers)
        assert not (tmp_path / "wandb").exists()
        monkeypatch.setenv("WANDB_MODE", "offline")
        close_loggers(build_loggers(WANDB, tmp_path, CONFIG))
        assert "this run is kept offline" in capfd.readouterr().out

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"mode": "bogus"}, "logger.mode=bogus: Input should be 'online', 'offline'"),
            ({"project": "a/b"}, "logger.project=a/b: Invalid project name 'a/b'"),
            ({"id": "a/b"}, "logger.id=a/b: Run ID cannot contain"),
            ({"tags": [""]}, "logger.tags=['']: Value error, Tag at index 0 is empty"),
            ({"nothing": 5}, "logger.nothing=5: init() got an unexpected"),
        ],
    )
    def test_what_wandb_refuses_is_named(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: Any, said: str
    ) -> None:
        close_loggers(build_loggers({**WANDB, **options}, tmp_path, CONFIG))
        out, err = capfd.readouterr()
        assert f"wandb: it could not start ({said}" in err
        assert (out, err.count("\n")) == ("", 1)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_variable_is_named(self, tmp_path: Path) -> None:
        refused = {
            "WANDB_MODE": ("bogus", "Input should be 'online', 'offline'"),
            "WANDB_RUN_ID": ("a/b", "Run ID cannot contain"),
            "WANDB_INIT_TIMEOUT": ("soon", "Input should be a valid number"),
        }
        # wandb reads its variables once, and importing it takes most of the time.
        script = f"""
import os, sys
from pathlib import Path
import wandb
from imagegen.tracking.loggers import build_loggers
for name, value in {[(name, value) for name, (value, _) in refused.items()]}:
    child = os.fork()
    if not child:
        os.environ[name] = value
        build_loggers({WANDB}, Path(sys.argv[1]), {{}})
        sys.stderr.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            env={**os.environ, "WANDB_MODE": "offline"},
            cwd=PROJECT_ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stderr.splitlines() if line.startswith("wandb: it could")]
        assert len(lines) == len(refused), done.stderr
        for line, (name, (value, said)) in zip(lines, refused.items(), strict=True):
            assert f"wandb: it could not start ({name}={value}: {said}" in line

    def test_words_that_look_like_numbers(self, tmp_path: Path) -> None:
        options = {**WANDB, "name": 5, "tags": 7}
        loggers = build_loggers(options, tmp_path, CONFIG)
        close_loggers(loggers)
        assert len(loggers) == 2

    def test_what_is_uploaded_is_checked_before_the_run(self) -> None:
        with pytest.raises(UserError, match=r"logger\.log_model=maybe must be true, false or all"):
            check_logger({**WANDB, "log_model": "maybe"})
        for upload in (True, False, "all"):
            check_logger({**WANDB, "log_model": upload})
        check_logger(None)

    @pytest.mark.parametrize("also_offline", [False, True])
    def test_a_failing_start_does_not_stop_training(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        also_offline: bool,
    ) -> None:
        import wandb

        init = wandb.init

        def fail(**options: Any) -> Any:
            if also_offline or options["mode"] == "online":
                raise wandb.errors.CommError("the server is away\nand more")
            return init(**options)

        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setattr(wandb, "init", fail)
        loggers = build_loggers(WANDB, tmp_path, CONFIG)
        assert len(loggers) == (1 if also_offline else 2)
        close_loggers(loggers)
        out, err = capfd.readouterr()
        assert (out + err).count("\n") == 1
        assert "could not start (the server is away), so" in out + err
        assert ("continues without it" in err) == also_offline


class TestTensorBoard:
    def test_images_metrics_and_configuration(self, tmp_path: Path, pixels: np.ndarray) -> None:
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        loggers = build_loggers(TENSORBOARD, tmp_path, CONFIG)
        for logger in loggers:
            logger.log_metrics({"loss": 0.5}, 7)
        log_images(loggers, "val/samples", pixels, 7)
        log_images(loggers, "val/grey", pixels[..., :1], 7)
        close_loggers(loggers)
        events = EventAccumulator(str(tmp_path / "tensorboard"), {"images": 0})
        events.Reload()
        assert [(e.step, e.value) for e in events.Scalars("loss")] == [(7, 0.5)]
        grey = pixels[..., 0]
        for key, expected, mode in (("val/samples", pixels, "RGB"), ("val/grey", grey, "L")):
            (image,) = events.Images(key)
            path = tmp_path / "image.png"
            path.write_bytes(image.encoded_image_string)
            assert np.array_equal(np.asarray(Image.open(path).convert(mode)), expected)
        text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
        assert yaml.safe_load(text.replace("\n    ", "\n")[4:]) == CONFIG

    def test_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import imagegen.tracking.loggers as module

        def missing(*args: Any, **options: Any) -> Callable[..., Any]:
            raise ModuleNotFoundError("tensorboard")

        monkeypatch.setattr(module, "TensorBoardLogger", missing)
        with pytest.raises(UserError, match="pip install"):
            build_loggers(TENSORBOARD, tmp_path, CONFIG)
