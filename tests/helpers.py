"""Small things that several test files build."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import train
from imagegen.build import build
from imagegen.checkpoint import KEY, make_metadata
from imagegen.cli import compose
from imagegen.data.base import ImageDataset
from imagegen.model import ImageTransformer
from imagegen.sampling import run
from imagegen.spec import ImageSpec

DIGITS = {"_target_": "imagegen.data.digits.Digits"}

TINY_MODEL: dict[str, Any] = {
    "attention": {"_target_": "imagegen.attention.linear.LinearAttention"},
    "head": {"_target_": "imagegen.heads.mixture_of_logistics.MixtureOfLogistics", "n_mixtures": 2},
    "embedding": {"_target_": "imagegen.embedding.ValueAndSinusoid"},
    "n_layers": 1,
    "d_model": 16,
    "n_heads": 2,
    "d_ff": 16,
}


def tiny_model(spec: ImageSpec, seed: int = 0, **options: Any) -> ImageTransformer:
    """An untrained model; `options` replace those of TINY_MODEL."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ImageTransformer(spec, **{**TINY_MODEL, **options}).eval()
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


def write_image(path: Path, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """A random image, as written."""
    image = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return image


def sample(ckpt: Path, out: Path, *overrides: str) -> Path:
    """Run `sample.py` with these options."""
    return run(compose("sample", [f"ckpt={ckpt}", f"out={out}", "device=cpu", *overrides]))


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
