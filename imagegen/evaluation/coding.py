"""Images to bytes and back without loss: an arithmetic coder that asks the model what to expect.

A value of probability p takes -log2 p bits, so the size of the code is the model's bits/dim to
within rounding. The coder is constriction's range coder (an implementation of Martin, 1979).

Axes: `n` image, `b` image of a batch, `h w c` height, width, channel, `v` level.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer, UInt8, UInt32

from imagegen.core.errors import UserError
from imagegen.core.float64 import to_float64
from imagegen.core.inference import inference
from imagegen.core.installation import pip_install
from imagegen.generation.sampling_request import ROW_GROUP
from imagegen.generation.watching import Progress
from imagegen.model.transformer import ImageTransformer

BATCH = 64
"""Images that are coded side by side. Files depend on it: both ways must round alike."""

Code = Callable[[Float[np.ndarray, "b v"], slice, int], Integer[np.ndarray, " b"]]


def encode(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    progress: Progress | None = None,
) -> UInt32[np.ndarray, " words"]:
    """The code of the images, in order.

    Args:
        model: steps through the images on its device, in eval mode; their probabilities are
            computed in float64, on its `float64_device`. The code can be read on the same kind of
            device only.
        images: levels.
        progress: called with the (fractional) number of images done since the last call.

    Raises:
        UserError: where constriction is not installed.
    """
    constriction = _constriction()
    encoder = constriction.stream.queue.RangeEncoder()
    family = constriction.stream.model.Categorical(perfect=False)
    values = images.reshape(len(images), -1)

    def code(probabilities: np.ndarray, rows: slice, dim: int) -> np.ndarray:
        symbols = values[rows, dim].astype(np.int32)
        encoder.encode(symbols, family, probabilities)
        return symbols

    _walk(model, len(images), code, progress)
    return np.asarray(encoder.get_compressed(), dtype=np.uint32)


def decode(
    model: ImageTransformer,
    words: UInt32[np.ndarray, " words"],
    n: int,
    progress: Progress | None = None,
) -> UInt8[np.ndarray, "n h w c"]:
    """The `n` images that `encode` made `words` of, with the same model on the same machine.

    Where the model rounds otherwise than it did then, other images come out; compare a checksum.

    Args:
        model, progress: as in `encode`.
        words: the code.
        n: number of images.

    Raises:
        UserError: where constriction is not installed.
    """
    constriction = _constriction()
    decoder = constriction.stream.queue.RangeDecoder(words)
    family = constriction.stream.model.Categorical(perfect=False)
    values = np.empty((n, model.spec.dims), dtype=np.uint8)

    def code(probabilities: np.ndarray, rows: slice, dim: int) -> np.ndarray:
        symbols: np.ndarray = decoder.decode(family, probabilities)
        values[rows, dim] = symbols
        return symbols

    _walk(model, n, code, progress)
    return values.reshape(n, *model.spec.shape)


def _walk(model: ImageTransformer, n: int, code: Code, progress: Progress | None) -> None:
    """Step through all images, batch by batch; `code` says the value of each dimension.

    Both ways go through the very same operations on the very same numbers, because the decoder has
    to find the probabilities of the encoder to the last bit.
    """
    with inference(model):
        for first in range(0, n, BATCH):
            _walk_batch(model, slice(first, min(first + BATCH, n)), code, progress)


def _walk_batch(
    model: ImageTransformer, rows: slice, code: Code, progress: Progress | None
) -> None:
    count = rows.stop - rows.start
    # Whole groups of rows, as in generation, so that an image rounds alike in any company.
    filled = math.ceil(count / ROW_GROUP) * ROW_GROUP
    length, per_step = model.raster.length, model.raster.values_per_step
    parameters, state = model.step(None, model.initial_state(filled))
    for step in range(length):
        exact = to_float64(parameters)
        given = torch.zeros(filled, 0, dtype=torch.int64, device=exact.device)
        for value in range(per_step):
            log_probabilities = model.head.log_probabilities(exact, given)
            probabilities = log_probabilities[:count].exp().float().cpu().numpy()
            known = torch.zeros(filled, 1, dtype=torch.int64)
            known[:count, 0] = torch.from_numpy(
                code(probabilities, rows, step * per_step + value).astype(np.int64)
            )
            given = torch.cat([given, known.to(given.device)], dim=1)
        if progress:
            progress(count / length)
        if step + 1 < length:
            parameters, state = model.step(given.byte().to(model.device), state)


def _constriction() -> Any:
    try:
        import constriction
    except ImportError as error:
        raise UserError(
            "the codec needs the package constriction; install it with "
            f"{pip_install('codec', 'constriction')}."
        ) from error
    return constriction
