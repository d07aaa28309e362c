"""Which models the compiled loops can draw from, and how their weights are prepared."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from imagegen.core.compiled.elementwise import ACTIVATIONS
from imagegen.generation.decode import mixers
from imagegen.generation.decode.embedding import (
    KNOWN,
    condition_tables,
    prediction_tables,
    tables_of,
)
from imagegen.generation.decode.loop import Settings, Weights
from imagegen.generation.decode.matmul import PANEL
from imagegen.generation.decode.matrix import Matrix, matrix
from imagegen.generation.decode.mixers import Mixer, MixSettings, angles
from imagegen.heads.categorical import Categorical
from imagegen.heads.controls import Controls
from imagegen.heads.mixture_of_logistics import MixtureOfLogistics
from imagegen.model.block import Block, GatedLinearUnit
from imagegen.model.transformer import ImageTransformer


def why_not(model: ImageTransformer) -> str | None:
    """Why the compiled loop cannot draw from this model; None where it can."""
    if model.norm.weight.dtype != torch.float32:
        return f"weights of {str(model.norm.weight.dtype).removeprefix('torch.')}"
    if model.device.type != "cpu":
        return "the model is not on the CPU"
    if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
        return "weights that are not finite"
    if not isinstance(model.embedding, KNOWN):
        return f"no tables for {type(model.embedding).__name__}"
    if not isinstance(model.head, (MixtureOfLogistics, Categorical)):
        return f"no sampler for {type(model.head).__name__}"
    blocks = cast(list[Block], list(model.blocks))
    if len({type(block.attention) for block in blocks}) > 1:
        return "no loop for several mechanisms"
    for block in blocks:
        reason = mixers.why_not(block.attention)
        if reason is not None:
            return reason
        if block.convolution is not None:
            return "no loop for convolutions"
    return None


def _matrix(layers: list[nn.Linear], bits: int) -> Matrix:
    weights = [layer.weight.detach().float().numpy() for layer in layers]
    return matrix(weights, [layer.bias.detach().float().numpy() for layer in layers], bits)


def _groups(layers: list[Mixer], bits: int) -> Matrix:
    """The projections to the heads' groups, each group padded to whole panels."""
    _, group, inputs = layers[0].weight.shape
    padding = (0, -group % PANEL)
    weights = [np.pad(layer.weight, ((0, 0), padding, (0, 0))) for layer in layers]
    biases = [np.pad(layer.bias, ((0, 0), padding)) for layer in layers]
    return matrix([w.reshape(-1, inputs) for w in weights], [b.reshape(-1) for b in biases], bits)


def _norm(norm: nn.Module) -> np.ndarray:
    weight = cast(Tensor, norm.weight).detach().float().numpy()
    bias = getattr(norm, "bias", None)
    zero = np.zeros_like(weight)
    return np.stack([weight, zero if bias is None else bias.detach().float().numpy()])


def choices_of(model: ImageTransformer) -> int:
    """The most logits that a value or a component is chosen by."""
    head, levels = model.head, model.spec.levels
    if isinstance(head, MixtureOfLogistics):
        return max(head.n_components, levels if head.categorical else 0)
    return levels


def features_of(model: ImageTransformer) -> int:
    """Of the feed-forward layer."""
    return cast(nn.Linear, cast(Block, model.blocks[0]).feed_forward[-1]).in_features


def _scales(block: Block, width: int) -> np.ndarray:
    ones = torch.ones(width)
    scales = [ones if t is None else t.detach().float() for t in (block.scale1, block.scale2)]
    return torch.stack(scales).numpy()


def weights_of(model: ImageTransformer, layers: list[Mixer], bits: int) -> Weights:
    """The weights of a model as the loop reads them."""
    blocks = cast(list[Block], list(model.blocks))
    return Weights(
        tables_of(model.embedding),
        *condition_tables(model),
        prediction_tables(model.prediction, model.embedding),
        mix=_groups(layers, bits),
        rates=np.stack([layer.rates for layer in layers]),
        mix_norm=np.stack([layer.norm for layer in layers]),
        convolution=np.stack([layer.convolution for layer in layers]),
        angles=angles(layers[0].settings.d, model.raster.length),
        out=matrix(
            [layer.out_weight for layer in layers], [layer.out_bias for layer in layers], bits
        ),
        up=_matrix([cast(nn.Linear, block.feed_forward[0]) for block in blocks], bits),
        down=_matrix([cast(nn.Linear, block.feed_forward[-1]) for block in blocks], bits),
        norms=np.stack([np.stack([_norm(block.norm1), _norm(block.norm2)]) for block in blocks]),
        last_norm=_norm(model.norm),
        scales=np.stack([_scales(block, model.embedding.d_model) for block in blocks]),
        # The distribution's own numbers, and few: not rounded.
        head=_matrix([cast(MixtureOfLogistics, model.head).projection], 32),
    )


def settings_of(model: ImageTransformer, mix: MixSettings, controls: Controls) -> Settings:
    """What else the loop has to know of a model and of how to draw."""
    block = cast(Block, model.blocks[0])
    nonlinear = block.feed_forward[1]
    gated = isinstance(nonlinear, GatedLinearUnit)
    activation = nonlinear.activation if isinstance(nonlinear, GatedLinearUnit) else nonlinear
    head = model.head
    levels = model.spec.levels
    if isinstance(head, MixtureOfLogistics):
        mixture, unit = True, head.residual_unit
        components, logits = head.n_mixtures, head.n_logits
        choice, scale = controls.for_mixture, controls.for_scale
    else:
        mixture, unit, components, logits = False, 1.0, levels, levels
        choice, scale = controls.temperature, 1.0
    given = cast(float | None, model.norm.eps)
    eps = torch.finfo(torch.float32).eps if given is None else given  # RMSNorm's default
    return Settings(
        mix,
        features_of(model),
        block.norm_first,
        isinstance(model.norm, nn.LayerNorm),
        np.float32(eps),
        ACTIVATIONS[type(activation).__name__.lower()],
        gated,
        mixture,
        components,
        logits,
        levels,
        unit,
        float(choice),
        float(scale),
        float(controls.top_p),
        float(controls.guidance),
    )
