"""The models that come with the project: small, described, free of this machine, and working."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.core.installation import PROJECT_ROOT, shipped_models
from imagegen.data.base import ImageDataset
from imagegen.data.digits import Digits
from imagegen.data.mnist import MNIST
from imagegen.evaluation.checks import all_checks
from tests.helpers import read_images, sample

MODELS = shipped_models()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_a_model_is_small_described_and_draws(folder: Path, tmp_path: Path) -> None:
    assert (folder / "model.safetensors").stat().st_size <= 3_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    for part in ("bits/dim", "python train.py", "imagegen export", "imagegen evaluate", "icence"):
        assert part in card, f"{folder.name}: no {part}"
    loaded = load_checkpoint(folder)
    assert not re.search(r'"(/|[A-Z]:\\)', (folder / "config.json").read_text(encoding="utf-8"))
    labels = ["label=all"] if loaded.model.n_classes else []
    images = read_images(sample(folder, tmp_path / "out", "n=2", "batch_size=2", *labels))
    for image in images.values():
        assert image.shape == loaded.model.spec.shape
        assert image.std() > 10  # neither empty nor one grey


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_a_model_is_verified(folder: Path) -> None:
    model = load_checkpoint(folder).model
    images = np.random.default_rng(0).integers(0, model.spec.levels, (1, *model.spec.shape))
    checks = all_checks(model, images.astype(np.uint8), 0)
    wrong = {each.name for each in checks if each.ok is False}
    assert wrong == set()


def test_all_models_together_are_small() -> None:
    assert MODELS
    assert sum(map(_size, MODELS)) <= 12_000_000


def test_digits_score_as_their_card_says() -> None:
    found, figure = _scores("digits", Digits())
    assert found == pytest.approx(figure, abs=1e-3)


@pytest.mark.parametrize("name", ["mnist", "mnist_any"])
def test_mnist_scores_as_its_card_says(name: str, shared_data: Path) -> None:
    """Of 100 images the mean lies 0.03 around that of all."""
    found, figure = _scores(name, MNIST(shared_data, download=False), 100)
    assert found == pytest.approx(figure, abs=0.09)


def _scores(name: str, data: ImageDataset, most: int | None = None) -> tuple[float, float]:
    """Bits/dim of the first test images given their labels, and what the card says of all."""
    split = data.split("test")
    assert split.labels is not None
    images, labels = (torch.from_numpy(each[:most].copy()) for each in (split.images, split.labels))
    model = load_checkpoint(PROJECT_ROOT / "models" / name).model
    card = (PROJECT_ROOT / "models" / name / "README.md").read_text(encoding="utf-8")
    figure = re.search(r"given their labels \| \*?\*?([0-9.]+)", card)
    assert figure is not None
    with torch.inference_mode():
        found = model.bits_per_dim(images, labels.long()).mean().item()
    return found, float(figure[1])
