"""Linear attention (Katharopoulos et al., 2020): a transformer layer that is a recurrent network.

Axes: `b` batch, `n` position, `h` head, `d` query/key feature, `m` value feature, `e` model width,
`c` chunk, `l` position inside a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.attention.base import AttentionState, CausalAttention
from imagegen.attention.feature_maps import feature_map_named
from imagegen.errors import UserError

DEFAULT_CHUNK = 64


@dataclass
class LinearState(AttentionState):
    """S = sum phi(k) v^T and z = sum phi(k) (eq. 18 and 19), float32 at least."""

    s: Float[Tensor, "b h d m"]
    z: Float[Tensor, "b h d"]


def chunked_linear_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n m"],
    state: LinearState | None = None,
    chunk_size: int = DEFAULT_CHUNK,
    eps: float = 1e-6,
) -> tuple[Float[Tensor, "b h n m"], LinearState]:
    """Causal linear attention over features that are already mapped (eq. 9), in chunks.

    Inside a chunk the masked product (Q K^T) V is formed; the chunks before it enter through S and
    z. Time and memory are linear in `n`, and one state a chunk is kept for the backward pass.

    Args:
        q, k: mapped queries and keys, non-negative.
        v: values.
        state: S and z of the positions before the first one.
        chunk_size: the longest chunk; the sequence is cut evenly into chunks no longer than this.
        eps: added to the normaliser.
    """
    length = q.shape[2]
    n_chunks = math.ceil(length / chunk_size)
    chunk = math.ceil(length / n_chunks)
    # The padding follows the feature map, for phi(0) is not 0 and would count in the normaliser.
    padding = (0, 0, 0, n_chunks * chunk - length)
    q, k, v = (
        rearrange(F.pad(t, padding), "b h (c l) f -> b h c l f", c=n_chunks) for t in (q, k, v)
    )

    s_chunk = k.mT @ v
    z_chunk = k.sum(dim=-2)
    if state is not None:
        s_chunk = torch.cat([state.s.unsqueeze(2), s_chunk], dim=2)
        z_chunk = torch.cat([state.z.unsqueeze(2), z_chunk], dim=2)
    else:
        s_chunk = F.pad(s_chunk, (0, 0, 0, 0, 1, 0))
        z_chunk = F.pad(z_chunk, (0, 0, 1, 0))
    s_before = s_chunk.cumsum(dim=2)
    z_before = z_chunk.cumsum(dim=2)

    scores = (q @ k.mT).tril()
    numerator = scores @ v + q @ s_before[:, :, :-1]
    normalizer = scores.sum(dim=-1) + (q @ z_before[:, :, :-1].unsqueeze(-1)).squeeze(-1)
    y = numerator / (normalizer + eps).unsqueeze(-1)
    y = rearrange(y, "b h c l m -> b h (c l) m")[:, :, :length]
    return y, LinearState(s_before[:, :, -1], z_before[:, :, -1])


def recurrent_linear_attention(
    q: Float[Tensor, "b h d"],
    k: Float[Tensor, "b h d"],
    v: Float[Tensor, "b h m"],
    state: LinearState,
    eps: float = 1e-6,
) -> tuple[Float[Tensor, "b h m"], LinearState]:
    """One step of the recurrence (eq. 16 to 20): update S and z, then read them."""
    if torch.is_grad_enabled():
        s = state.s + k.unsqueeze(-1) * v.unsqueeze(-2)
        z = state.z + k
    else:
        s = state.s.addcmul_(k.unsqueeze(-1), v.unsqueeze(-2))
        z = state.z.add_(k)
    numerator = (q.unsqueeze(-2) @ s).squeeze(-2)
    normalizer = (q * z).sum(dim=-1, keepdim=True) + eps
    return numerator / normalizer, LinearState(s, z)


class LinearAttention(CausalAttention[LinearState]):
    """Multi-head linear attention, y_i = phi(q_i)^T S_i / phi(q_i)^T z_i (eq. 8 to 20).

    Args:
        feature_map: `elu` (elu(x) + 1, the paper's) or `relu`.
        chunk_size: longest chunk of the parallel form.
        eps: added to the normaliser.
        context: see `CausalAttention`.

    Raises:
        UserError: for an unknown feature map or a chunk size below one.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        feature_map: str = "elu",
        chunk_size: int = DEFAULT_CHUNK,
        eps: float = 1e-6,
        **context: Any,
    ) -> None:
        super().__init__(d_model, n_heads, head_dim, **context)
        if chunk_size < 1:
            raise UserError(f"attention.chunk_size={chunk_size} must be at least 1.")
        self.feature_map = feature_map_named(feature_map)
        self.chunk_size = chunk_size
        self.eps = eps
        inner = self.n_heads * self.head_dim
        self.qkv = nn.Linear(d_model, 3 * inner)
        self.out = nn.Linear(inner, d_model)

    def forward(
        self, x: Float[Tensor, "b n e"], state: LinearState | None = None
    ) -> tuple[Float[Tensor, "b n e"], LinearState]:
        q, k, v = rearrange(
            self.qkv(x), "b n (three h f) -> three b h n f", three=3, h=self.n_heads
        )
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = self._mapped(q, k, v)
            y, state = chunked_linear_attention(q, k, v, state, self.chunk_size, self.eps)
        return self.out(rearrange(y, "b h n m -> b n (h m)").to(x.dtype)), state

    def step(
        self, x: Float[Tensor, "b e"], state: LinearState
    ) -> tuple[Float[Tensor, "b e"], LinearState]:
        q, k, v = rearrange(self.qkv(x), "b (three h f) -> three b h f", three=3, h=self.n_heads)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = self._mapped(q, k, v)
            y, state = recurrent_linear_attention(q, k, v, state, self.eps)
        return self.out(rearrange(y, "b h m -> b (h m)").to(x.dtype)), state

    def initial_state(self, batch_size: int) -> LinearState:
        weight = self.qkv.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        shape = (batch_size, self.n_heads, self.head_dim)
        return LinearState(
            torch.zeros(*shape, self.head_dim, dtype=dtype, device=weight.device),
            torch.zeros(*shape, dtype=dtype, device=weight.device),
        )

    def _mapped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Sums over thousands of positions need float32, whatever the layers around them use.
        dtype = torch.promote_types(q.dtype, torch.float32)
        return self.feature_map(q.to(dtype)), self.feature_map(k.to(dtype)), v.to(dtype)
