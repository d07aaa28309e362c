"""Small things that several test files build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from imagegen.build import build
from imagegen.checkpoint import KEY, make_metadata
from imagegen.data.base import ImageDataset
from imagegen.model import ImageTransformer
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
        return ImageTransformer(spec, **{**TINY_MODEL, **options}).eval()


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
