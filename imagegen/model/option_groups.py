"""Options of a model that belong together, checked as far as each goes by itself."""

from __future__ import annotations

from dataclasses import dataclass

from imagegen.core.errors import UserError


@dataclass(frozen=True)
class SequenceOptions:
    """How an image becomes a sequence, and which part of it training predicts.

    Attributes:
        tokens: what a step predicts, see `Raster`.
        order: of the values. In `any`, the visible pixels of a region come first and the others
            follow, each in the order of the raster; the embedding then sees known pixels on all
            sides. `raster` knows no regions.
        whole_images: share of training images of which nothing is visible, with `order=any`; the
            others get a random region.
        visible_weight: of visible values in the loss, 0 to 1; missing ones have 1.

    Raises:
        UserError: for shares out of their range.
    """

    tokens: str = "subpixel"
    order: str = "raster"
    whole_images: float = 0.25
    visible_weight: float = 1.0

    def __post_init__(self) -> None:
        _check_share("whole_images", self.whole_images)
        _check_share("visible_weight", self.visible_weight)


@dataclass(frozen=True)
class ConditionOptions:
    """What a model is given of an image beside its values: a label, an orientation.

    Attributes:
        n_classes: number of labels that the model is conditioned on; none by default.
        label_grid: what a label adds to the input differs between so many by so many areas of the
            image, see `LabelEmbedding`.
        label_dropout: share of labels withheld in training, so that the model also learns to do
            without (classifier-free guidance, Ho and Salimans, 2022).
        orders: in how many orientations images are trained on, and given to the model: 1, 2
            (mirrored too), 4 (upside down too) or 8 (turned by 90 degrees too); see
            `imagegen.model.orientations`. Images are drawn as they are, and completed in the
            orientation that suits what is visible.
        flips: as orders=2, and a label's areas are those of the mirrored image; what options and
            checkpoints of before say.

    Raises:
        UserError: for a grid or a share out of its range.
    """

    n_classes: int | None = None
    label_grid: int = 1
    label_dropout: float = 0.1
    orders: int = 1
    flips: bool = False

    def __post_init__(self) -> None:
        if self.label_grid < 1:
            raise UserError(f"model.label_grid={self.label_grid} must be at least 1.")
        _check_share("label_dropout", self.label_dropout)


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise UserError(f"model.{name}={share} must be between 0 and 1.")
