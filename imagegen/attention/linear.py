"""Linear attention (Katharopoulos et al., 2020): a transformer layer that is a recurrent network.

Axes: `b` batch, `n` position, `h` head, `d` query/key feature (after the feature map), `m` value
feature, `e` model width, `c` chunk, `l` position inside a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.attention.base import DEFAULT_CHUNK, AttentionState, CausalAttention
from imagegen.attention.feature_maps import build_feature_map
from imagegen.attention.linear_chunks import LinearChunks
from imagegen.attention.linear_scan import (
    CHUNKS,
    SHORTEST,
    LinearScan,
    machine_choice,
    takes,
    why_chunks,
)
from imagegen.attention.query_key_norm import QueryKeyNorm
from imagegen.core.errors import UserError
from imagegen.core.machine import Choice

Watch = Callable[[Tensor], None]


@dataclass
class LinearState(AttentionState):
    """S = sum phi(k) v^T and z = sum phi(k) (eq. 10 and 11), float32 at least.

    For feature maps whose keys come with a scale, S and z lack the factor exp(scale), where `scale`
    is the largest one so far.
    """

    s: Float[Tensor, "b h d m"]
    z: Float[Tensor, "b h d"]
    scale: Float[Tensor, "b h"] | None = None


def chunked_linear_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n m"],
    state: LinearState | None = None,
    chunk_size: int = DEFAULT_CHUNK,
    eps: float = 1e-6,
    *,
    scale: Float[Tensor, "b h n"] | None = None,
    floor: float | None = None,
    watch: Watch | None = None,
) -> tuple[Float[Tensor, "b h n m"], LinearState]:
    """Causal linear attention over features that are already mapped (eq. 9), in chunks.

    Inside a chunk the masked product (Q K^T) V is formed; the chunks before it enter through S and
    z. Time and memory are linear in `n`, and one state a chunk is kept for the backward pass.

    Args:
        q, k: mapped queries and keys, non-negative unless there is a `floor`.
        v: values.
        state: S and z of the positions before the first one.
        chunk_size: the longest chunk; the sequence is cut evenly into chunks no longer than this.
        eps: added to the normaliser, in units of exp(the largest `scale` so far) if there is one.
        scale: logarithms of the factors that the keys lack, as constants. A position is answered
            relative to the largest one up to there, so no exponential is of anything above 0.
        floor: the normaliser is clamped to this from below, and `eps` is not added.
        watch: called with the normalisers "b h n".
    """
    batch, heads, length, features = q.shape
    n_chunks = math.ceil(length / chunk_size)
    chunk = math.ceil(length / n_chunks)
    padding = (0, n_chunks * chunk - length)
    if state is None:
        s = q.new_zeros(batch, heads, features, v.shape[-1])
        z, before = q.new_zeros(batch, heads, features), None
    else:
        s, z, before = state.s, state.z, state.scale

    def chunks(t: Tensor) -> Tensor:
        """Of "b h n ..." to "g l ..."."""
        return t.contiguous().view(batch * heads * n_chunks, chunk, *t.shape[3:])

    scales: tuple[Tensor, ...] = ()
    if scale is not None:
        lowest = torch.finfo(scale.dtype).min
        if before is None:
            before = scale.new_full(scale.shape[:2], lowest)
        scale = F.pad(scale, padding, value=lowest)
        largest = torch.cat([before.unsqueeze(2), scale], dim=2).cummax(dim=2).values
        # A view would keep those of all positions with the state.
        before = largest[:, :, -1].clone()
        scales = (chunks(scale), chunks(largest[:, :, 1:]), largest[:, :, :-1:chunk].flatten())
    # The padding follows the feature map, for phi(0) is not 0 and would count in the normaliser.
    if padding[1]:
        q, k, v = (F.pad(t, (0, 0, *padding)) for t in (q, k, v))
    y, normalizer, s, z = LinearChunks.apply(
        chunks(q), chunks(k), chunks(v), s, z, eps, floor, *scales
    )
    if padding[1]:
        y = y[:, :length]
    if watch is not None:
        watch(normalizer.detach().view(batch, heads, -1)[:, :, :length])
    return y.transpose(1, 2), LinearState(s, z, before)


def recurrent_linear_attention(
    q: Float[Tensor, "b h d"],
    k: Float[Tensor, "b h d"],
    v: Float[Tensor, "b h m"],
    state: LinearState,
    eps: float = 1e-6,
    *,
    scale: Float[Tensor, "b h"] | None = None,
    floor: float | None = None,
    watch: Watch | None = None,
) -> tuple[Float[Tensor, "b h m"], LinearState]:
    """One step of the recurrence (eq. 16 to 20): update S and z, then read them."""
    s, z, before = state.s, state.z, state.scale
    in_place = not torch.is_grad_enabled()
    if scale is not None and before is not None:
        largest = torch.maximum(before, scale)
        decay = (before - largest).exp().unsqueeze(-1)
        k = k * (scale - largest).exp().unsqueeze(-1)
        s = s.mul_(decay.unsqueeze(-1)) if in_place else s * decay.unsqueeze(-1)
        z = z.mul_(decay) if in_place else z * decay
        before = largest
    if in_place:
        s = s.addcmul_(k.unsqueeze(-1), v.unsqueeze(-2))
        z = z.add_(k)
    else:
        s = s + k.unsqueeze(-1) * v.unsqueeze(-2)
        z = z + k
    numerator = (q.unsqueeze(-2) @ s).squeeze(-2)
    normalizer = (q * z).sum(dim=-1)
    if watch is not None:
        watch(normalizer.detach())
    return _normalized(numerator, normalizer, eps, floor), LinearState(s, z, before)


def _normalized(numerator: Tensor, normalizer: Tensor, eps: float, floor: float | None) -> Tensor:
    normalizer = normalizer + eps if floor is None else normalizer.clamp(min=floor)
    return numerator / normalizer.unsqueeze(-1)


class LinearAttention(CausalAttention[LinearState]):
    """Multi-head linear attention, as sums (eq. 10 to 12) or as a recurrent network (eq. 16 to 20).

        S_i = S_(i-1) + phi(k_i) v_i^T,   z_i = z_(i-1) + phi(k_i)
        y_i = phi(q_i)^T S_i / phi(q_i)^T z_i

    Args:
        feature_map: one of `feature_maps.FEATURE_MAPS`; `elu` (elu(x) + 1) is the paper's.
        n_features: number of random features of `favor` and `fourier`.
        chunk_size: longest chunk of the parallel form.
        eps: added to the normaliser; None for 1e-12 with `elu`, whose normaliser is above 0 and may
            become small in long trainings, and for 1e-6 with other maps.
        qk_norm: whether queries and keys pass a `QueryKeyNorm` before the map.
        context: see `CausalAttention`.

    Attributes:
        normalizer_observer: is called with the normalisers of every call, before `eps` or a clamp,
            detached, "b h n" or of a step "b h"; None at first. `favor`'s are relative to the
            largest features of the query and of the keys so far.

    Raises:
        UserError: for an unknown feature map, a number of features that it cannot have, a chunk
            size below one, or an eps not above 0.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        feature_map: str = "elu",
        n_features: int | None = None,
        chunk_size: int = DEFAULT_CHUNK,
        eps: float | None = 1e-6,
        qk_norm: bool = False,
        **context: Any,
    ) -> None:
        super().__init__(d_model, n_heads, head_dim, **context)
        if chunk_size < 1:
            raise UserError(f"attention.chunk_size={chunk_size} must be at least 1.")
        if eps is None:
            eps = 1e-12 if feature_map == "elu" else 1e-6
        if not 0 < eps < math.inf:
            raise UserError(f"attention.eps={eps} must be above 0.")
        self.chunk_size = chunk_size
        self.eps = eps
        self.normalizer_observer: Watch | None = None
        inner = self.n_heads * self.head_dim
        self.qkv = nn.Linear(d_model, 3 * inner)
        self.out = nn.Linear(inner, d_model)
        self.qk_norm = QueryKeyNorm(self.head_dim) if qk_norm else None
        self.feature_map = build_feature_map(feature_map, self.n_heads, self.head_dim, n_features)

    def forward(
        self, x: Float[Tensor, "b n e"], state: LinearState | None = None
    ) -> tuple[Float[Tensor, "b n e"], LinearState]:
        qkv = self.qkv(x)
        if self.qk_norm is None and x.shape[1] >= SHORTEST:
            apart = rearrange(qkv, "b n (three h d) -> b n three h d", three=3, h=self.n_heads)
            if takes(apart, self.feature_map):
                return self._scanned(apart, state)
        # Of layouts that chunks can be cut from, so that the maps keep no other copy of them.
        q, k, v = (
            t.contiguous()
            for t in rearrange(qkv, "b n (three h f) -> three b h n f", three=3, h=self.n_heads)
        )
        with torch.autocast(x.device.type, enabled=False):
            q, k, v, scale = self._mapped(q, k, v)
            y, state = chunked_linear_attention(
                q, k, v, state, self.chunk_size, self.eps, scale=scale, **self._options()
            )
        return self.out(rearrange(y, "b h n m -> b n (h m)").to(x.dtype)), state

    def _scanned(self, qkv: Tensor, state: LinearState | None) -> tuple[Tensor, LinearState]:
        before = self.initial_state(len(qkv)) if state is None else state
        y, normalizer, s, z = LinearScan.apply(qkv, before.s, before.z, self.eps, self.feature_map)
        if self.normalizer_observer is not None:
            self.normalizer_observer(normalizer)
        return self.out(y.flatten(2)), LinearState(s, z)

    def step(
        self, x: Float[Tensor, "b e"], state: LinearState
    ) -> tuple[Float[Tensor, "b e"], LinearState]:
        q, k, v = rearrange(self.qkv(x), "b (three h f) -> three b h 1 f", three=3, h=self.n_heads)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v, scale = self._mapped(q, k, v)
            scale = None if scale is None else scale.squeeze(2)
            y, state = recurrent_linear_attention(
                q.squeeze(2),
                k.squeeze(2),
                v.squeeze(2),
                state,
                self.eps,
                scale=scale,
                **self._options(),
            )
        return self.out(rearrange(y, "b h m -> b (h m)").to(x.dtype)), state

    def initial_state(self, batch_size: int) -> LinearState:
        weight = self.qkv.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        shape = (batch_size, self.n_heads, self.feature_map.feature_dim)
        return LinearState(
            torch.zeros(*shape, self.head_dim, dtype=dtype, device=weight.device),
            torch.zeros(*shape, dtype=dtype, device=weight.device),
            # Not -inf, because -inf - -inf is nan.
            torch.full(shape[:2], torch.finfo(dtype).min, dtype=dtype, device=weight.device)
            if self.feature_map.scaled
            else None,
        )

    def computed(self, length: int, device: torch.device, dtype: torch.dtype) -> Choice:
        """How `forward` goes through so many positions, stored in this dtype, and why."""
        if self.qk_norm is not None:
            return Choice(CHUNKS, "attention.qk_norm normalises queries and keys")
        if length < SHORTEST:
            return Choice(CHUNKS, f"{length} positions, fewer than {SHORTEST}")
        why = why_chunks(device, dtype, self.head_dim, self.feature_map)
        return machine_choice() if why is None else Choice(CHUNKS, why)

    def _mapped(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        # Sums over thousands of positions need float32, whatever the layers around them use.
        dtype = torch.promote_types(q.dtype, torch.float32)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        k, scale = self.feature_map.keys(k)
        return self.feature_map.queries(q), k, v, scale

    def _options(self) -> dict[str, Any]:
        return {
            "floor": self.feature_map.floor,
            "watch": self.normalizer_observer,
        }
