"""Images turned by hand, and models that take every image for a turned one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imagegen.model.orientations import WORDS
from imagegen.model.transformer import ImageTransformer
from tests.helpers import tiny_model

NEIGHBOURHOOD = {"_target_": "imagegen.model.embeddings.Neighbourhood"}

LITERAL: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as it is": lambda image: image,
    "mirrored left to right": np.fliplr,
    "mirrored top to bottom": np.flipud,
    "turned by 180 degrees": lambda image: np.rot90(image, 2),
    "mirrored along the diagonal from the upper left": lambda image: image.swapaxes(0, 1),
    "turned by 90 degrees clockwise": lambda image: np.rot90(image, -1),
    "turned by 90 degrees counterclockwise": np.rot90,
    "mirrored along the diagonal from the upper right": lambda image: np.rot90(
        image.swapaxes(0, 1), 2
    ),
}


def by_hand(images: Tensor, orientation: int) -> Tensor:
    """All of the images in one orientation, as its name says it."""
    literal = LITERAL[WORDS[orientation]]
    return torch.from_numpy(np.stack([literal(image) for image in images.numpy()]))


def of_one_orientation(model: ImageTransformer, orientation: int) -> ImageTransformer:
    """A model without orientations that takes every image for one of this.

    That orientation is added to its labels, of which it has one where the model has none.
    """
    assert model.flip is not None
    grid = 1 if model.label is None or model.label.areas is None else 2
    options: dict[str, Any] = {"n_classes": model.n_classes or 1, "label_grid": grid}
    tokens = "pixel" if model.raster.values_per_step > 1 else "subpixel"
    plain = tiny_model(model.spec, embedding=NEIGHBOURHOOD, n_layers=2, tokens=tokens, **options)
    plain = plain.to(model.norm.weight.dtype)
    own = {name: value for name, value in model.state_dict().items() if name != "flip.weight"}
    plain.load_state_dict(own, strict=model.label is not None)
    with torch.no_grad():
        plain.label.weight += model.flip.weight[orientation]  # type: ignore[union-attr]
        if model.label is None:
            plain.label.weight[:] = model.flip.weight[orientation]  # type: ignore[union-attr]
        if plain.label is not None and plain.label.areas is not None:
            grids = plain.label.areas.unflatten(1, (2, 2))
            plain.label.areas[:] = by_hand(grids, orientation).flatten(1, 2)
    return plain
