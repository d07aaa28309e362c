"""Small things that several test files build."""

from __future__ import annotations

import copy
import csv
import functools
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from PIL import Image
from pytorch_lightning import Callback

import train
from imagegen.checkpoint.reading import KEY, load_checkpoint, make_metadata
from imagegen.cli.entry import compose
from imagegen.core.build import build
from imagegen.core.spec import ImageSpec
from imagegen.data.base import ImageDataset
from imagegen.generation.job import run
from imagegen.model.transformer import ImageTransformer

DIGITS = {"_target_": "imagegen.data.digits.Digits"}

TINY_MODEL: dict[str, Any] = {
    "attention": {"_target_": "imagegen.attention.linear.LinearAttention"},
    "head": {"_target_": "imagegen.heads.mixture_of_logistics.MixtureOfLogistics", "n_mixtures": 2},
    "embedding": {"_target_": "imagegen.model.embeddings.ValueAndSinusoid"},
    "n_layers": 1,
    "d_model": 16,
    "n_heads": 2,
    "d_ff": 16,
}


def tiny_model(spec: ImageSpec, seed: int = 0, **options: Any) -> ImageTransformer:
    """An untrained model; `options` replace those of TINY_MODEL."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ImageTransformer.from_options(spec, **{**TINY_MODEL, **options}).eval()
        if model.label is not None and model.label.areas is not None:
            # As trained: they start at zero, where nothing would show.
            torch.nn.init.normal_(model.label.areas, std=0.3)
        return model


def save_tiny_checkpoint(
    path: Path, dataset: Mapping[str, Any] = DIGITS, seed: int = 0, **options: Any
) -> Path:
    """Write a checkpoint of an untrained model, as training would."""
    spec = build(dataset, ImageDataset).spec
    model = tiny_model(spec, seed, **options)
    content = {
        "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
        KEY: make_metadata(spec, {**TINY_MODEL, **options}, dataset, config={}, overrides=[]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def run_train(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of `train.py` in this process."""
    return run_main(monkeypatch, train.main, "train.py", *arguments)


def run_main(monkeypatch: pytest.MonkeyPatch, main: Callable[[], Any], *argv: str) -> int:
    """The exit status of a command's `main`, which takes its arguments from sys.argv."""
    monkeypatch.setattr(sys, "argv", [*argv])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def assert_refused(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    run: Path,
    override: str,
    sentence: str,
) -> None:
    """A training with this override is refused in one line that says so, and writes nothing."""
    assert run_train(monkeypatch, *SMALL, override, f"hydra.run.dir={run}") == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    assert sentence in error
    assert not run.exists()


def write_image(path: Path, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """A random image, as written."""
    image = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return image


def sample(ckpt: Path, out: Path, *overrides: str) -> Path:
    """Run `sample.py` with these options."""
    config = copy.deepcopy(_composed(overrides))
    typed = {override.partition("=")[0] for override in overrides}
    for name, value in {"ckpt": ckpt, "out": out}.items():
        if name not in typed:
            config[name] = str(value)
    return run(config)


@functools.cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    """Once for all that draw so: it takes longer than a few small images do."""
    return compose("sample", ["ckpt=", "device=cpu", *overrides])


def read(path: Path) -> np.ndarray:
    """A PNG as "h w c"."""
    with Image.open(path) as image:
        array = np.array(image)
    return array[..., None] if array.ndim == 2 else array


def read_images(out: Path) -> dict[str, np.ndarray]:
    return {path.name: read(path) for path in sorted((out / "images").iterdir())}


def manifest(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return found


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def save_colour_checkpoint(folder: Path, height: int = 4, width: int = 6) -> Path:
    """A checkpoint of an untrained model of images of 3 channels, 256 levels, and its data."""
    for i in range(10):
        write_image(folder / "photos" / f"{i}.png", (height, width, 3), seed=i)
    dataset = {
        "_target_": "imagegen.data.image_folder.ImageFolder",
        "root": str(folder / "photos"),
        "size": [height, width],
        "channels": 3,
        "cache": str(folder / "cache"),
    }
    return save_tiny_checkpoint(folder / "tiny.ckpt", dataset=dataset)


SMALL = [
    "model.n_layers=1",
    "model.d_model=16",
    "model.n_heads=2",
    "model.d_ff=16",
    "trainer=cpu",
    "logger=none",
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=6",
    "trainer.limit_val_batches=1",
    "trainer.log_every_n_steps=2",
    "callbacks.grids=null",
]
"""Options of a small training run, which draws nothing."""

DRAWING = [
    *SMALL[:-1],
    "callbacks.grids.n_samples=4",
    "callbacks.grids.n_completed=2",
    "callbacks.grids.completions=2",
]
"""Those of a small run with pictures of samples and completions at each validation."""

WANDB = {"_target_": "imagegen.tracking.loggers.wandb_logger", "project": "p", "log_model": False}


def read_rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(folder / "checkpoints/last.ckpt").model.state_dict()


def wandb_records(folder: Path) -> list[Any]:
    """What the transaction log of an offline run holds."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("run-*.wandb")
    # wandb's own process may write the last of it a moment after the run has finished.
    for _ in range(100):
        records = [wandb_internal_pb2.Record.FromString(r) for r in log_records(file.read_bytes())]
        if any(record.HasField("exit") for record in records):
            break
        time.sleep(0.1)
    return records


def read_wandb(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Configuration and history in the transaction log of an offline run."""
    config: dict[str, Any] = {}
    history = []
    for record in wandb_records(folder):
        for updates in (record.run.config.update, record.config.update):
            config.update({item.key: json.loads(item.value_json) for item in updates if item.key})
        if record.HasField("history"):
            items = record.history.item
            names = [item.key or ".".join(item.nested_key) for item in items]
            history.append(dict(zip(names, (json.loads(i.value_json) for i in items), strict=True)))
    return config, history


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format: blocks of 32 KiB, parts of a CRC, a length and a type."""
    position, record = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


class Interrupt(Callback):
    """Presses Ctrl-C, or sends another signal, after the third step of the second epoch, once."""

    armed = False
    number = signal.SIGINT

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 9 and Interrupt.armed:
            Interrupt.armed = False
            os.kill(os.getpid(), Interrupt.number)
