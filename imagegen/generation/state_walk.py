"""The state that generation carries, looked at while an image is drawn.

Axes: `s` values per step, `h` head, `d m` the two axes of a head's matrix, `c` channel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from imagegen.attention.base import AttentionState
from imagegen.core.errors import UserError
from imagegen.core.float64 import float64_device
from imagegen.generation.random_numbers import noise
from imagegen.generation.sampling_request import SamplingRequest, initial_state, no_gradients
from imagegen.generation.watching import Growth
from imagegen.heads.controls import Controls
from imagegen.model.block import Block
from imagegen.model.transformer import ImageTransformer, ModelState


@dataclass(frozen=True)
class Moment:
    """An image that is being drawn, and the state behind the value drawn last.

    Attributes:
        position: the number of steps drawn.
        levels, known: see `imagegen.generation.watching.Snapshot`.
        matrices: of the heads of one layer; rows are key features, columns value features, where
            the mechanism has such a matrix.
        state_bytes: of the whole state, of one image.
        softmax_bytes: of the keys and values that a softmax model of this size keeps by then.
    """

    position: int
    levels: UInt8[np.ndarray, "height width c"]
    known: Bool[np.ndarray, "height width"]
    matrices: Float[np.ndarray, "h d m"]
    state_bytes: int
    softmax_bytes: int


def walk_state(
    model: ImageTransformer,
    layer: int,
    *,
    seed: int = 0,
    controls: Controls | None = None,
    labels: Sequence[int] | None = None,
    every: int = 1,
) -> Iterator[Moment]:
    """Draw image 0 of a seed with PyTorch's own steps, one moment after every `every` of them.

    The image is that of `generate` up to rounding. The last moment is that of the whole image.

    Raises:
        UserError: as `generate`, and for a layer that there is not.
    """
    if not 0 <= layer < len(model.blocks):
        raise UserError(f"layer {layer} is not one of the model's, 0 to {len(model.blocks) - 1}.")
    request = SamplingRequest.of(model, seed, controls, labels, None)
    return _walk(model, layer, request, every)


def _walk(
    model: ImageTransformer, layer: int, request: SamplingRequest, every: int
) -> Iterator[Moment]:
    raster, length = model.raster, model.raster.length
    sequence = np.zeros((1, length, raster.values_per_step), dtype=np.uint8)
    growth = Growth(None, None, [(0, 0)], 0, raster, lambda: sequence)
    uniforms = torch.from_numpy(noise(model, request.seed, [(0, 0)], 0, 1))
    numbers = uniforms.to(float64_device(model.device))
    with no_gradients(model):
        parameters, state = model.step(None, initial_state(model, [0], 1, request))
    for step in range(length):
        with no_gradients(model):
            drawn = model.head.draw_levels(parameters, numbers[:, step], request.controls)
            levels = drawn.to(torch.uint8)
            sequence[:, step] = levels.cpu().numpy()
            if step < length - 1:
                parameters, state = model.step(levels.repeat(request.copies, 1), state)
            growth(slice(0, 1), step + 1)
            done = step + 1
            if done % every == 0 or done == length:
                shot = growth.snapshot()
                matrices = head_matrices(state.layers[layer]).float().cpu().numpy()
                sizes = _state_bytes(state), softmax_bytes(model, done)
                moment = Moment(done, shot.levels[0], shot.known[0], matrices, *sizes)
        if done % every == 0 or done == length:
            yield moment


def head_matrices(state: AttentionState) -> Float[Tensor, "h d m"]:
    """The largest tensor of a layer's state, of the first image, as one matrix a head.

    For linear attention it is S = sum phi(k) v^T, for a cache the keys or values so far; what has
    fewer axes becomes matrices of one head or one row.
    """
    largest = max(state.tensors(), key=lambda tensor: tensor.numel())[0].detach()
    while largest.dim() < 3:
        largest = largest.unsqueeze(0)
    return largest.flatten(1, -2) if largest.dim() > 3 else largest


def softmax_bytes(model: ImageTransformer, position: int) -> int:
    """Bytes that the keys and values of `position` steps take in float32, in all layers."""
    layers = [block.attention for block in cast(list[Block], model.blocks)]
    return sum(2 * 4 * position * layer.n_heads * layer.head_dim for layer in layers)


def _state_bytes(state: ModelState) -> int:
    return state.nbytes // len(state.recent)
