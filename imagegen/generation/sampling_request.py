"""What images are to be drawn, checked, and the states that their drawing starts from.

Axes: `b` batch, `k` image, `n` position, `h w` height and width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from imagegen.core.errors import UserError
from imagegen.core.inference import inference
from imagegen.core.machine import limited_threads
from imagegen.generation.decode import Decoder, choose_decoder
from imagegen.generation.watching import Progress, Watch
from imagegen.heads.controls import Controls
from imagegen.model.transformer import NO_LABEL, ImageTransformer, ModelState

# Matrix products round differently for a handful of rows than for many. Batches are filled up to
# whole groups of this many rows, so that an image does not depend on what is drawn beside it: found
# with the libraries that PyTorch uses on CPUs.
ROW_GROUP = 16


@dataclass(frozen=True)
class SamplingRequest:
    """What all images of one call have in common.

    Attributes:
        seed: of the random numbers.
        controls: how to draw.
        labels: image i has labels[i % len(labels)]; None for no labels.
        progress: called with the number of images done since the last call.
        decoder: compiled code that draws from the model; None for PyTorch's operations.
        watch: called with snapshots of the images that are being drawn.
    """

    seed: int
    controls: Controls
    labels: tuple[int, ...] | None
    progress: Progress | None
    decoder: Decoder | None = None
    watch: Watch | None = None

    @classmethod
    def of(
        cls,
        model: ImageTransformer,
        seed: int,
        controls: Controls | None,
        labels: Sequence[int] | None,
        progress: Progress | None,
        precision: str = "auto",
        watch: Watch | None = None,
        batch_size: int = 1,
    ) -> SamplingRequest:
        """The request of a user, checked.

        Raises:
            UserError: for labels or controls that the model does not have, or a seed or precision
            that there is not.
        """
        if not 0 <= seed < 2**64:
            raise UserError(f"seed={seed} must be between 0 and 2^64 - 1.")
        controls = controls or Controls()
        model.head.check(controls)
        if labels is not None:
            check_labels(model, labels)
        elif controls.guidance != 1:
            raise UserError(
                f"guidance={controls.guidance} needs labels to guide towards; add label=."
            )
        chosen = None if labels is None else tuple(labels)
        decoder = choose_decoder(model, controls, precision, batch_size)
        return cls(seed, controls, chosen, progress, decoder, watch)

    @property
    def loop(self) -> str:
        """Which code draws: images of one differ from those of another by rounding."""
        return "torch" if self.decoder is None else f"compiled, {self.decoder.precision}"

    @property
    def copies(self) -> int:
        """Rows that an image takes: two with guidance, one with and one without its label."""
        return 1 if self.controls.guidance == 1 else 2

    def labels_of(self, images: Sequence[int], rows: int) -> Int64[Tensor, " b"] | None:
        """Labels of the images, repeated to fill the rows, then those of the second half.

        They are on the CPU.
        """
        if self.labels is None:
            return None
        own = np.resize([self.labels[image % len(self.labels)] for image in images], rows)
        copies = np.full(rows * (self.copies - 1), NO_LABEL)
        return torch.from_numpy(np.concatenate([own, copies]).astype(np.int64))


def check_labels(model: ImageTransformer, labels: Sequence[int]) -> None:
    """Refuse labels that the model does not know.

    Raises:
        UserError: for those.
    """
    if model.n_classes is None:
        raise UserError(
            "this model was trained without labels, so it cannot draw a class; train one with "
            "model.conditional=true."
        )
    if not labels:
        raise UserError("labels is empty; give at least one.")
    for label in labels:
        if not NO_LABEL <= label < model.n_classes:
            raise UserError(
                f"label={label} is unknown; the model has labels 0 to {model.n_classes - 1}."
            )


def knows_any_order(model: ImageTransformer) -> bool:
    """Whether a model takes the visible pixels of any region first, or all in raster order."""
    return model.order == "any"


def first_pixels(
    model: ImageTransformer, visible: Bool[np.ndarray, "b h w"]
) -> Bool[Tensor, "b h w"] | None:
    """The pixels that come first, on the model's device; None for those of the raster."""
    return torch.from_numpy(visible).to(model.device) if knows_any_order(model) else None


def kept_steps(model: ImageTransformer, visible: Bool[np.ndarray, "h w"]) -> Bool[np.ndarray, " n"]:
    """The steps of the raster whose values are kept: all those of each visible pixel."""
    return visible.repeat(model.raster.steps_per_pixel)


def initial_state(
    model: ImageTransformer,
    images: Sequence[int],
    rows: int,
    request: SamplingRequest,
    order: Bool[Tensor, "rows h w"] | None = None,
    orientation: Int64[np.ndarray, " k"] | None = None,
) -> ModelState:
    """The state before the first step, of `rows` rows (twice as many with guidance).

    Args:
        order: see `first_pixels`.
        orientation: of each of the images; as they are by default.
    """
    labels, turns = request.labels_of(images, rows), None
    on_device = None if labels is None else labels.to(model.device)
    if orientation is not None:
        turns = torch.from_numpy(np.resize(orientation, rows)).to(model.device)
        turns = turns.repeat(request.copies)
    if order is not None:
        order = order.repeat(request.copies, 1, 1)
    return model.initial_state(rows * request.copies, on_device, order, turns)


@contextmanager
def no_gradients(model: ImageTransformer) -> Iterator[None]:
    """Without gradients, dropout or idle threads, leaving the model as it was."""
    with inference(model), limited_threads():
        yield
