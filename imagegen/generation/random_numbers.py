"""The random numbers of an image: they depend on the seed and its index alone.

Axes: `n` position, `u` uniform numbers per step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from imagegen.model.transformer import ImageTransformer


def uniforms(seed: int, image: int, stream: int, count: int) -> Float[np.ndarray, " count"]:
    """The random numbers of one image: float64 in the open interval (0, 1).

    They come from a Philox counter keyed by (seed, image), so that image i of a seed is the same
    whatever is drawn beside it; `stream` tells several completions of one image apart.
    """
    # As whole numbers of 64 bits: a list with one above 2^63 would become floats, and rounded.
    key, counter = (
        np.array(words, dtype=np.uint64) for words in ([seed, image], [0, 0, 0, stream])
    )
    bits = np.random.Philox(key=key, counter=counter).random_raw(count)
    numbers: np.ndarray = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return numbers


def noise(
    model: ImageTransformer, seed: int, streams: Sequence[tuple[int, int]], first: int, rows: int
) -> Float[np.ndarray, "rows n u"]:
    """The random numbers of the steps from `first` on.

    Noise belongs to a position: a completion's does not depend on how much is visible.
    """
    length, per_step = model.raster.length, model.head.uniforms_per_step
    numbers = [uniforms(seed, image, stream, length * per_step) for image, stream in streams]
    shaped = np.stack(numbers).reshape(len(streams), length, per_step)[:, first:]
    return np.resize(shaped, (rows, *shaped.shape[1:]))
