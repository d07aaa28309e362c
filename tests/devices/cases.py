"""The models that the ways are tried with.

The mechanisms are those of conf/attention/, with the variants that their contract is tested with,
and the heads those of conf/head/: a new one of either is here without being registered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from imagegen.cli.entry import PROJECT_ROOT
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.model.transformer import ImageTransformer
from tests.attention.helpers import cases as attentions

HEADS = sorted((PROJECT_ROOT / "conf" / "head").glob("*.yaml"))
COLOUR, GREY, SQUARE = ImageSpec(3, 2, 3, 9), ImageSpec(3, 2, 1, 9), ImageSpec(3, 3, 1, 9)
N_CLASSES = 3

ANY_ORDER = {
    ("linear", "categorical"): "subpixel",
    ("linear", "mixture_of_logistics"): "pixel",
    ("softmax", "mixture_of_logistics"): "subpixel",
}
"""Tokens of the cases of any order, by mechanism and head."""
TURNED = ("linear", "categorical")
"""Mechanism and head of the case of eight orientations; the others are mirrored only."""


def _mechanisms() -> Iterator[Any]:
    for attention, head in zip(attentions(), itertools.cycle(HEADS), strict=False):
        options = (attention.values[0], yaml.safe_load(head.read_text()))
        yield pytest.param(options, id=f"{attention.id}-{head.stem}")


def _heads() -> Iterator[Any]:
    for head in HEADS:
        for name in ("linear", "softmax"):
            text = (PROJECT_ROOT / "conf" / "attention" / f"{name}.yaml").read_text()
            options = (yaml.safe_load(text), yaml.safe_load(head.read_text()))
            yield pytest.param(options, id=f"{head.stem}-{name}")
            if (name, head.stem) in ANY_ORDER:
                tokens = ANY_ORDER[name, head.stem]
                yield pytest.param((*options, "any", tokens), id=f"{head.stem}-{name}-any-order")
            if (name, head.stem) == TURNED:
                turned = (*options, "raster", "pixel", 8)
                yield pytest.param(turned, id=f"{head.stem}-{name}-turned")


MECHANISM_CASES, HEAD_CASES = list(_mechanisms()), list(_heads())


def make(case: tuple[Any, ...]) -> ImageTransformer:
    """A small model with all that a model can have beside its mechanism and its head."""
    attention, head, *others = case
    order, tokens, orders = (*others, *("raster", "pixel", 2)[len(others) :])

    def model(spec: ImageSpec) -> ImageTransformer:
        torch.manual_seed(0)
        made = ImageTransformer.from_options(
            spec,
            attention=attention,
            head=head,
            embedding={"_target_": "imagegen.model.embeddings.Neighbourhood"},
            n_layers=1,
            d_model=16,
            n_heads=2,
            d_ff=16,
            tokens=tokens,
            linear_prediction=True,
            convolution=[1, 1] if order == "raster" else None,
            order=order,
            n_classes=N_CLASSES,
            label_grid=2,
            orders=orders,
        )
        assert made.label is not None
        assert made.label.areas is not None
        # As trained: they start at zero, where nothing would show.
        torch.nn.init.normal_(made.label.areas, std=0.3)
        return made.eval()

    if orders == 8:
        return model(SQUARE)
    try:
        return model(COLOUR)
    except UserError:  # A head of one value a step.
        return model(GREY)


def images_of(model: ImageTransformer, n: int) -> np.ndarray:
    values = np.random.default_rng(1).integers(0, model.spec.levels, (n, *model.spec.shape))
    return values.astype(np.uint8)


def labels_of(n: int) -> np.ndarray:
    return np.arange(n) % (N_CLASSES + 1) - 1


def batch_of(model: ImageTransformer, n: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels and orientations, on the model's device."""
    device = model.device
    images, labels = torch.from_numpy(images_of(model, n)), torch.from_numpy(labels_of(n))
    return images.to(device), labels.to(device), ((5 - torch.arange(n)) % model.orders).to(device)
