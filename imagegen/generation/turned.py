"""Images to complete, turned so that the model begins at the side from which most is visible.

Axes: `n` image, `k` some of them, `h w c` height, width, channel, `m` step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8

from imagegen.core.errors import UserError
from imagegen.generation.particles import PARTICLES
from imagegen.generation.sampling_request import kept_steps, knows_any_order
from imagegen.generation.watching import Snapshot, Watch
from imagegen.model.orientations import best_orientation, turn, turn_back
from imagegen.model.transformer import ImageTransformer


@dataclass(frozen=True)
class Turned:
    """Images, and what is visible of them, in the orientations that a model completes them in.

    Attributes:
        images: levels.
        visible: the pixels that are kept.
        orientation: of each image; see `imagegen.model.orientations`.
    """

    images: UInt8[np.ndarray, "n h w c"]
    visible: Bool[np.ndarray, "n h w"]
    orientation: Int64[np.ndarray, " n"]

    @classmethod
    def of(
        cls,
        model: ImageTransformer,
        images: UInt8[np.ndarray, "n h w c"],
        visible: Bool[np.ndarray, "n h w"],
    ) -> Turned:
        """These images, which are as they are."""
        orientation = orientations_for(model, visible)
        return cls(_turned(images, orientation), _turned(visible, orientation), orientation)

    def back(
        self, drawn: UInt8[np.ndarray, "k h w c"], pairs: Sequence[tuple[int, int]]
    ) -> UInt8[np.ndarray, "k h w c"]:
        """Completions, each of the image and the number in `pairs`, as the images are."""
        orientation = self.orientation[[image for image, _ in pairs]]
        if not orientation.any():
            return drawn
        return turn_back(torch.from_numpy(drawn), torch.from_numpy(orientation)).numpy()

    def watched(self, watch: Watch) -> Watch:
        """`watch`, called with the images as they are."""

        def tell(shot: Snapshot) -> None:
            known = self.back(shot.known[..., None].astype(np.uint8), shot.which)[..., 0] > 0
            watch(replace(shot, levels=self.back(shot.levels, shot.which), known=known))

        return tell


def orientations_for(
    model: ImageTransformer, visible: Bool[np.ndarray, "n h w"]
) -> Int64[np.ndarray, " n"]:
    """The orientations that a model completes images in, each the best for what is visible.

    Models of any order begin with what is visible anyway, and take images as they are.
    """
    if model.orders == 1 or knows_any_order(model):
        return np.zeros(len(visible), dtype=np.int64)
    masks = torch.from_numpy(np.array(visible))
    return np.array([best_orientation(mask, model.orders) for mask in masks], dtype=np.int64)


def needs_particles(model: ImageTransformer, kept: Bool[np.ndarray, " m"]) -> bool:
    """Whether a step that is kept comes after one that is not, in the order of the model."""
    return not knows_any_order(model) and bool(kept[int(kept.argmin()) :].any() and not kept.all())


def particles_for(
    model: ImageTransformer, visible: Bool[np.ndarray, "n h w"], given: int | None
) -> int | None:
    """How many particles an image has, where any of the images needs them; else None.

    Args:
        visible: of the images as they are.
        given: their number, if a user has typed it.

    Raises:
        UserError: for a number that has no effect.
    """
    turned = _turned(visible, orientations_for(model, visible))
    if any(needs_particles(model, kept_steps(model, each)) for each in turned):
        return given or PARTICLES
    if given is not None:
        raise UserError(
            f"particles={given} has no effect, because all that is kept comes before what is "
            "drawn; leave it out."
        )
    return None


def _turned(images: np.ndarray, orientation: Int64[np.ndarray, " n"]) -> np.ndarray:
    if not orientation.any():
        return images
    # Copied, since PyTorch takes no array that cannot be written.
    return turn(torch.from_numpy(np.array(images)), torch.from_numpy(orientation)).numpy()
