"""What the compiled loop has to know of an attention mechanism, and how its weights are laid out.

Each head gets a group of outputs of one projection: query, key, value, then the decays, the write
strength and the output gate where the mechanism has them. Values are padded to whole vectors.

Axes: `h` head, `g` output of a head's group, `i` input, `e` model width, `d` query/key feature, `m`
value feature, padded, `w` input of the short convolution, `c` its channel of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.attention.base import AttentionState, CausalAttention
from imagegen.attention.decay_attention import DecayState
from imagegen.attention.delta import DeltaNet, DeltaState
from imagegen.attention.feature_maps import FunctionMap
from imagegen.attention.gated_delta import GatedDeltaNet
from imagegen.attention.gla import GatedLinearAttention
from imagegen.attention.linear import LinearAttention, LinearState
from imagegen.attention.retention import Retention
from imagegen.attention.softmax import SoftmaxAttention, SoftmaxState
from imagegen.core.compiled.elementwise import FEATURE_MAPS
from imagegen.core.compiled.vectors import LANES

NO_DECAY, FIXED, LOG_SIGMOID, SOFTPLUS = 0, 1, 2, 3
NO_NORM, LAYER_NORM, RMS_NORM = 0, 1, 2
NO_GATE, SILU, SIGMOID = 0, 1, 2


class MixSettings(NamedTuple):
    """What tells the mechanisms apart.

    Attributes:
        feature_map: of `LinearMix`, one of `elementwise.FEATURE_MAPS`.
        d, m, true_m: features of a query and of a value, padded and not.
        decay: what the decays are made of: nothing, `rates` alone, or numbers x of the group as
            exp(-rate softplus(-x)) (LOG_SIGMOID) or exp(-rate softplus(x)) (SOFTPLUS).
        decays: numbers of the group they are made of.
        delta: whether the state is corrected (delta rule); the group then has a number beta, and
            queries and keys are made unit vectors.
        rotary: whether queries and keys are rotated by their position.
        norm, gate: what is done to the result.
        eps: of the normaliser or of the norm.
    """

    d: int
    m: int
    true_m: int
    feature_map: int = 0
    decay: int = NO_DECAY
    decays: int = 0
    delta: bool = False
    rotary: bool = False
    norm: int = NO_NORM
    gate: int = NO_GATE
    eps: float = 0.0


class LinearMix(MixSettings):
    """Of linear attention. The kinds are types, because code is compiled for the types at hand."""


class SoftmaxMix(MixSettings):
    """Of softmax attention, with a cache of keys and values."""


class DecayedMix(MixSettings):
    """Of mechanisms whose state decays or is corrected, and is read without a normaliser."""


@dataclass
class Mixer:
    """One layer's mechanism; float32.

    Attributes:
        settings: the same for all layers.
        weight, bias: of the projection of the heads' groups.
        out_weight, out_bias: of the projection of what the heads return.
        rates: see `MixSettings`.
        norm: weight and bias of the norm of what a head returns.
        convolution: of queries, keys and values; without inputs if there is no convolution.
    """

    settings: MixSettings
    weight: Float[np.ndarray, "h g i"]
    bias: Float[np.ndarray, "h g"]
    out_weight: Float[np.ndarray, "e hm"]
    out_bias: Float[np.ndarray, " e"]
    rates: Float[np.ndarray, " h"]
    norm: Float[np.ndarray, "weight_bias m"]
    convolution: Float[np.ndarray, "w h c"]


class States(NamedTuple):
    """The states of one layer; those that the mechanism lacks have no elements.

    Attributes:
        s: sums of keys and values "b h d m"; for softmax, values "b h n m".
        z: sums of keys "b h d".
        keys: "b h d n".
        recent: inputs of the short convolution "b w h c".
    """

    s: Float[np.ndarray, "b h d_or_n m"]
    z: Float[np.ndarray, "b h d"]
    keys: Float[np.ndarray, "b h d n"]
    recent: Float[np.ndarray, "b w h c"]


def why_not(attention: nn.Module) -> str | None:
    """Why the compiled loop has no form of this mechanism; None where it has."""
    if getattr(attention, "qk_norm", None) is not None:
        return "no loop for normalised queries and keys (attention.qk_norm)"
    if isinstance(attention, LinearAttention):
        known = _map_name(attention) in FEATURE_MAPS
        return None if known else "no loop for this feature map"
    if isinstance(attention, (Retention, GatedLinearAttention)):
        return "no loop for conv_size" if attention.short_convolution.size else None
    if isinstance(attention, (DeltaNet, SoftmaxAttention)):
        return None
    return f"no loop for {type(attention).__name__}"


@torch.no_grad()
def mixer_of(attention: CausalAttention[Any]) -> Mixer:
    """Prepare a mechanism that `why_not` has nothing against."""
    if isinstance(attention, LinearAttention):
        feature_map = FEATURE_MAPS[_map_name(attention)]
        return _mixer(attention, LinearMix, feature_map=feature_map, eps=attention.eps)
    if isinstance(attention, SoftmaxAttention):
        return _mixer(attention, SoftmaxMix, scale_q=attention.head_dim**-0.5)
    if isinstance(attention, Retention):
        head = torch.arange(attention.n_heads, dtype=torch.float64)
        return _mixer(
            attention,
            DecayedMix,
            scale_k=attention.key_dim**-0.5,
            rates=-torch.log1p(-torch.exp2(-5 - head)),
            norm=None if attention.output_norm else NO_NORM,
            gates=attention.gate,
            decay=FIXED,
            rotary=attention.rotary,
            eps=attention.norm_eps,
        )
    if isinstance(attention, GatedLinearAttention):
        return _mixer(
            attention,
            DecayedMix,
            scale_q=attention.key_dim**-0.5,
            rates=torch.full((attention.n_heads,), 1 / attention.gate_temperature),
            norm=NO_NORM if attention.norm is None else None,
            affine=attention.norm,
            gates=attention.gate,
            decays_of=attention.decay,
            decay=LOG_SIGMOID,
            eps=attention.norm_eps,
        )
    return _delta_mixer(cast(DeltaNet, attention))


def states_of(
    attention: CausalAttention[Any], state: AttentionState, part: slice, length: int
) -> States:
    """Copies of some rows of a state, with room for `length` positions where it grows."""
    settings = mixer_shape(attention)
    heads, d, m = attention.n_heads, settings.d, settings.m
    count = part.stop - part.start
    z, keys = _zeros(count, heads, 0), _zeros(count, heads, 0, 0)
    recent = _zeros(count, 0, heads, 0)
    if isinstance(state, SoftmaxState):
        room = math.ceil(length / LANES) * LANES
        s, keys = _zeros(count, heads, room, m), _zeros(count, heads, d, room)
        known = state.length
        s[:, :, :known, : settings.true_m] = state.values[part, :, :known].float().numpy()
        keys[..., :known] = state.keys[part, :, :known].float().numpy().swapaxes(-1, -2)
    else:
        sums = cast(LinearState | DecayState | DeltaState, state).s[part].float()
        s = F.pad(sums, (0, m - settings.true_m)).numpy()
    if isinstance(state, LinearState):
        z = state.z[part].float().numpy()
    if isinstance(state, DeltaState):
        recent = _by_head(state.recent[part].float(), settings, heads).numpy()
    # A cache is large, and copied already; sums may still be the caller's.
    copy = not isinstance(state, SoftmaxState)
    return States(*(t.astype(np.float32, order="C", copy=copy) for t in (s, z, keys, recent)))


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


def angles(features: int, length: int) -> Float[np.ndarray, "n half_d two"]:
    """Cosines and sines by which `imagegen.attention.retention.rotated` turns pairs of features."""
    theta = 10_000.0 ** (-np.arange(0, features - features % 2, 2) / features)
    angle = np.arange(length)[:, None] * theta
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


def mixer_shape(attention: CausalAttention[Any]) -> MixSettings:
    """The features of a mechanism's head, without its other settings."""
    d = getattr(attention, "key_dim", attention.head_dim)
    true_m = getattr(attention, "value_dim", attention.head_dim)
    return MixSettings(d, math.ceil(true_m / LANES) * LANES, true_m)


def _delta_mixer(attention: DeltaNet) -> Mixer:
    heads = attention.n_heads
    options: dict[str, Any] = {"decay": NO_DECAY}
    if isinstance(attention, GatedDeltaNet):
        options = {
            "decay": SOFTPLUS,
            "decays_of": attention.decay,
            "decay_bias": attention.step_bias,
            "rates": attention.log_rate.exp(),
        }
    if attention.conv.weight is not None:
        options["convolution"] = attention.conv.weight
    return _mixer(
        attention,
        DecayedMix,
        norm=NO_NORM if attention.norm is None else RMS_NORM,
        affine=attention.norm,
        gates=attention.output_gate,
        gate=SILU if attention.gate_activation is F.silu else SIGMOID,
        beta=attention.beta.weight.view(heads, 1, -1),
        delta=True,
        eps=1e-5 if attention.norm is None else cast(float, attention.norm.eps),
        **options,
    )


def _mixer(
    attention: Any,
    kind: type[MixSettings],
    *,
    scale_q: float = 1.0,
    scale_k: float = 1.0,
    decays_of: nn.Module | None = None,
    decay_bias: Tensor | None = None,
    beta: Float[Tensor, "h one i"] | None = None,
    gates: nn.Module | None = None,
    gate: int = SILU,
    rates: Tensor | None = None,
    norm: int | None = NO_NORM,
    affine: nn.Module | None = None,
    convolution: Float[Tensor, "w channels"] | None = None,
    **settings: Any,
) -> Mixer:
    """Put a mechanism's layers together; `norm` None means LAYER_NORM."""
    shape, heads = mixer_shape(attention), attention.n_heads
    d, m, true_m = shape.d, shape.m, shape.true_m
    parts = _queries_keys_values(attention, shape, scale_q, scale_k)
    decays = 0
    if decays_of is not None:
        weight, bias = _linear(decays_of)
        bias = bias if decay_bias is None else bias + decay_bias
        decays = len(bias) // heads
        parts.append((_heads(weight, heads), _heads(bias, heads)))
    if beta is not None:
        parts.append((beta, beta.new_zeros(heads, 1)))
    if gates is not None:
        weight, bias = _linear(gates)
        parts.append((_padded(_heads(weight, heads), m, 1), _padded(_heads(bias, heads), m, 1)))
    out_weight, out_bias = _linear(attention.out)
    out_weight = _padded(rearrange(out_weight, "e (h m) -> e h m", h=heads), m, 2).flatten(1)
    if convolution is None:
        by_head = torch.zeros(0, heads, 2 * d + m)
    else:
        by_head = _by_head(convolution.float(), shape, heads)
    norm = LAYER_NORM if norm is None else norm
    gate = NO_GATE if gates is None else gate
    return Mixer(
        kind(d, m, true_m, decays=decays, norm=norm, gate=gate, **settings),
        torch.cat([w for w, _ in parts], dim=1).numpy(),
        torch.cat([b for _, b in parts], dim=1).numpy(),
        out_weight.numpy(),
        out_bias.numpy(),
        (torch.zeros(heads) if rates is None else rates.float()).numpy(),
        _affine(affine, shape).numpy(),
        by_head.contiguous().numpy(),
    )


def _queries_keys_values(
    attention: Any, shape: MixSettings, scale_q: float, scale_k: float
) -> list[tuple[Float[Tensor, "h g i"], Float[Tensor, "h g"]]]:
    """Weights and biases of what every group begins with."""
    weight, bias = _linear(attention.qkv)
    q, k, v = _split(weight, shape, attention.n_heads)
    q_bias, k_bias, v_bias = _split(bias, shape, attention.n_heads)
    return [(q * scale_q, q_bias * scale_q), (k * scale_k, k_bias * scale_k), (v, v_bias)]


def _affine(module: nn.Module | None, shape: MixSettings) -> Float[Tensor, "weight_bias m"]:
    """Weight and bias of a norm, padded; 1 and 0 where it has none."""
    weight = torch.ones(shape.true_m) if module is None else cast(Tensor, module.weight)
    bias = getattr(module, "bias", None)
    bias = torch.zeros(shape.true_m) if bias is None else bias
    return torch.stack([_padded(t.float(), shape.m, 0) for t in (weight, bias)])


def _linear(module: nn.Module) -> tuple[Float[Tensor, "o i"], Float[Tensor, " o"]]:
    """Weight and bias of a linear layer, or of two in a row as one."""
    if isinstance(module, nn.Sequential):
        (first, _), (second, bias) = _linear(module[0]), _linear(module[1])
        return (second.double() @ first.double()).float(), bias
    linear = cast(nn.Linear, module)
    given = cast(Tensor | None, linear.bias)
    bias = torch.zeros(linear.out_features) if given is None else given.float()
    return linear.weight.float(), bias


def _split(t: Float[Tensor, " o *i"], shape: MixSettings, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values of each head, the values padded."""
    sizes = [heads * features for features in (shape.d, shape.d, shape.true_m)]
    q, k, v = (_heads(part, heads) for part in t.split(sizes))
    return q, k, _padded(v, shape.m, 1)


def _by_head(
    t: Float[Tensor, "... channels"], shape: MixSettings, heads: int
) -> Float[Tensor, "... h c"]:
    """Channels of queries, keys and values as those of each head, the values padded."""
    return torch.cat(_split(t.movedim(-1, 0), shape, heads), dim=1).movedim((0, 1), (-2, -1))


def _heads(t: Float[Tensor, " o *i"], heads: int) -> Float[Tensor, "h o_of_head *i"]:
    return t.unflatten(0, (heads, -1))


def _padded(t: Tensor, size: int, dim: int) -> Tensor:
    """Zeros up to a size."""
    missing = list(t.shape)
    missing[dim] = size - t.shape[dim]
    return torch.cat([t, t.new_zeros(missing)], dim=dim)


def _map_name(attention: LinearAttention) -> str:
    feature_map = attention.feature_map
    return feature_map.function.__name__ if isinstance(feature_map, FunctionMap) else ""
