"""Which models the compiled loops can draw from, and how their weights are prepared.

Axes: `b` batch, `n` position, `s` value a step, `u` uniform number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from imagegen.attention.feature_maps import FunctionMap
from imagegen.attention.linear import LinearAttention, LinearState
from imagegen.block import Block, GatedLinearUnit
from imagegen.decode import Decoder
from imagegen.decode.attention import FEATURE_MAPS
from imagegen.decode.elementwise import ACTIVATIONS
from imagegen.decode.embedding import tables_of
from imagegen.decode.linear import Settings, Weights, run
from imagegen.decode.matmul import TILE_ROWS, pack, pad
from imagegen.embedding import Neighbourhood, ValueAndSinusoid
from imagegen.heads.categorical import Categorical
from imagegen.heads.controls import Controls
from imagegen.heads.mixture_of_logistics import MixtureOfLogistics
from imagegen.model import ImageTransformer, ModelState

MICRO_BATCH = 48
"""Rows that go through the layers together: many for the arithmetic, few for the caches."""


class FusedDecoder(Decoder):
    """Draws from a model of linear attention on the CPU; see `why_not`.

    Args:
        model: its weights are copied, as they are now.
    """

    def __init__(self, model: ImageTransformer) -> None:
        reason = why_not(model)
        if reason is not None:
            raise ValueError(reason)
        self.model = model
        self.weights = _weights(model)

    def draw(
        self,
        state: ModelState,
        parameters: Float[Tensor, "rows p"],
        sequence: UInt8[np.ndarray, "b n s"],
        noise: Float[np.ndarray, "rows m u"],
        controls: Controls,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """See `Decoder`."""
        first, length = state.position - 1, sequence.shape[1]
        rows, stride = len(sequence), self.model.raster.row_length
        settings = _settings(self.model, controls)
        layers = cast(list[LinearState], state.layers)
        context = np.zeros((rows, self.model.embedding.d_model), dtype=np.float32)
        if state.context is not None:
            context += state.context[:rows].float().numpy()

        def draw_part(part: slice) -> None:
            count = part.stop - part.start
            s = np.stack([layer.s[part].float().numpy() for layer in layers])
            z = np.stack([layer.z[part].float().numpy() for layer in layers])
            known = np.zeros((count, len(self.weights.head_bias)), dtype=np.float32)
            known[:, : parameters.shape[1]] = parameters[part].float().numpy()
            own = (sequence[part], context[part], noise[part])
            for begin in range(first, length, stride):
                end = min(begin + stride, length)
                is_known = begin == first
                run(self.weights, settings, s, z, *own, first, begin, end, is_known, known)
                if progress is not None:
                    progress(count * (end - begin) / (length - first))

        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
            list(pool.map(draw_part, _parts(rows)))


def _parts(rows: int) -> list[slice]:
    """Micro-batches of about the same size, at least one for each thread where there are rows."""
    wanted = max(torch.get_num_threads(), math.ceil(rows / MICRO_BATCH))
    size = math.ceil(math.ceil(rows / wanted) / TILE_ROWS) * TILE_ROWS
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def why_not(model: ImageTransformer) -> str | None:
    """Why the compiled loop cannot draw from this model; None where it can."""
    if model.norm.weight.dtype != torch.float32:
        return f"weights of {str(model.norm.weight.dtype).removeprefix('torch.')}"
    if model.device.type != "cpu":
        return "the model does not lie on the CPU"
    if not isinstance(model.embedding, (ValueAndSinusoid, Neighbourhood)):
        return f"no tables for {type(model.embedding).__name__}"
    if not isinstance(model.head, (MixtureOfLogistics, Categorical)):
        return f"no sampler for {type(model.head).__name__}"
    for block in cast(list[Block], model.blocks):
        attention = block.attention
        if not isinstance(attention, LinearAttention):
            return f"no loop for {type(attention).__name__}"
        if _map_name(attention) not in FEATURE_MAPS:
            return "no loop for this feature map"
        if block.convolution is not None:
            return "no loop for convolutions"
    return None


def _map_name(attention: LinearAttention) -> str:
    feature_map = attention.feature_map
    return feature_map.function.__name__ if isinstance(feature_map, FunctionMap) else ""


def _stacked(layers: list[nn.Linear]) -> tuple[np.ndarray, np.ndarray]:
    weights = [layer.weight.detach().float().numpy() for layer in layers]
    biases = [layer.bias.detach().float().numpy() for layer in layers]
    return np.stack([pack(w) for w in weights]), np.stack([pad(b) for b in biases])


def _norm(norm: nn.Module) -> np.ndarray:
    weight = cast(Tensor, norm.weight).detach().float().numpy()
    bias = getattr(norm, "bias", None)
    zero = np.zeros_like(weight)
    return np.stack([weight, zero if bias is None else bias.detach().float().numpy()])


def _scales(block: Block, width: int) -> np.ndarray:
    ones = torch.ones(width)
    scales = [ones if t is None else t.detach().float() for t in (block.scale1, block.scale2)]
    return torch.stack(scales).numpy()


def _weights(model: ImageTransformer) -> Weights:
    tables = tables_of(cast(ValueAndSinusoid | Neighbourhood, model.embedding))
    blocks = cast(list[Block], list(model.blocks))
    attentions = [cast(LinearAttention, block.attention) for block in blocks]
    qkv, qkv_bias = _stacked([attention.qkv for attention in attentions])
    out, out_bias = _stacked([attention.out for attention in attentions])
    up, up_bias = _stacked([cast(nn.Linear, block.feed_forward[0]) for block in blocks])
    down, down_bias = _stacked([cast(nn.Linear, block.feed_forward[-1]) for block in blocks])
    head = cast(MixtureOfLogistics, model.head).projection
    width = model.embedding.d_model
    return Weights(
        tables.lags,
        tables.inside,
        tables.table,
        tables.place,
        qkv,
        qkv_bias,
        out,
        out_bias,
        up,
        up_bias,
        down,
        down_bias,
        np.stack([np.stack([_norm(block.norm1), _norm(block.norm2)]) for block in blocks]),
        _norm(model.norm),
        np.stack([_scales(block, width) for block in blocks]),
        pack(head.weight.detach().float().numpy()),
        pad(head.bias.detach().float().numpy()),
    )


def _settings(model: ImageTransformer, controls: Controls) -> Settings:
    block = cast(Block, model.blocks[0])
    attention = cast(LinearAttention, block.attention)
    nonlinear = block.feed_forward[1]
    gated = isinstance(nonlinear, GatedLinearUnit)
    activation = nonlinear.activation if isinstance(nonlinear, GatedLinearUnit) else nonlinear
    mixture = isinstance(model.head, MixtureOfLogistics)
    given = cast(float | None, model.norm.eps)
    eps = torch.finfo(torch.float32).eps if given is None else given  # RMSNorm's default
    return Settings(
        cast(nn.Linear, block.feed_forward[-1]).in_features,
        block.norm_first,
        isinstance(model.norm, nn.LayerNorm),
        np.float32(eps),
        ACTIVATIONS[type(activation).__name__.lower()],
        gated,
        FEATURE_MAPS[_map_name(attention)],
        np.float32(attention.eps),
        mixture,
        cast(MixtureOfLogistics, model.head).n_mixtures if mixture else model.spec.levels,
        model.spec.levels,
        float(controls.for_mixture if mixture else controls.temperature),
        float(controls.for_scale if mixture else 1.0),
    )
