"""Local attention: softmax over a causal sliding window (Beltagy et al., 2020, section 3.1).

Axes: `b` batch, `n` position, `h` head, `d` query/key/value feature, `w` place in the window,
`e` model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.attention.base import AttentionState, CausalAttention, Position
from imagegen.attention.buffers import ring_after, ring_in_order, ring_step
from imagegen.attention.query_key_norm import QueryKeyNorm
from imagegen.attention.windows import joined, window_blocks
from imagegen.core.errors import UserError


@dataclass
class LocalState(AttentionState):
    """Keys and values of the last w positions as a ring (see `buffers`), float32 at least."""

    keys: Float[Tensor, "b h w d"]
    values: Float[Tensor, "b h w d"]
    length: Position = 0


def blockwise_local_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h k d"],
    v: Float[Tensor, "b h k d"],
    window: int,
) -> Float[Tensor, "b h n d"]:
    """Softmax attention of each query over the last `window` keys up to its own.

    Time and memory are linear in `n`.

    Args:
        q: queries.
        k, v: keys and values of the same positions, and of those before the first query.
        window: at least 1.
    """
    blocks = window_blocks(q, k, v, window)
    # Batch and heads share an axis, because the fused kernels take four.
    y = F.scaled_dot_product_attention(
        blocks.q.flatten(0, 1),
        blocks.k.flatten(0, 1),
        blocks.v.flatten(0, 1),
        attn_mask=blocks.visible.unsqueeze(0),
    )
    return joined(y.unflatten(0, q.shape[:2]), q.shape[2])


class LocalAttention(CausalAttention[LocalState]):
    """Multi-head softmax attention over the last positions.

    y_i = sum_j softmax_j(q_i^T k_j / sqrt(d)) v_j over i - window < j <= i: the sliding window of
    Beltagy et al. (2020), the half of it that precedes a position. Stacked layers see further:
    L of them reach back L (window - 1) positions.

    Args:
        window: positions that each one sees, its own among them.
        qk_norm: whether queries and keys pass a `QueryKeyNorm` first.
        context: see `CausalAttention`.

    Raises:
        UserError: for a window below one.
    """

    needs_raster = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        window: int = 64,
        qk_norm: bool = False,
        **context: Any,
    ) -> None:
        super().__init__(d_model, n_heads, head_dim, **context)
        if window < 1:
            raise UserError(
                f"attention.window={window} must be at least 1, because a position sees itself."
            )
        self.window = window
        inner = self.n_heads * self.head_dim
        self.qkv = nn.Linear(d_model, 3 * inner)
        self.out = nn.Linear(inner, d_model)
        self.qk_norm = QueryKeyNorm(self.head_dim) if qk_norm else None

    def forward(
        self, x: Float[Tensor, "b n e"], state: LocalState | None = None
    ) -> tuple[Float[Tensor, "b n e"], LocalState]:
        q, k, v = rearrange(
            self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.n_heads
        )
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        state = state or self.initial_state(x.shape[0])
        after = LocalState(
            ring_after(state.keys, k, state.length),
            ring_after(state.values, v, state.length),
            state.length + x.shape[1],
        )
        kept = min(state.length, self.window - 1)
        if kept:
            k, v = (
                torch.cat([ring_in_order(ring, state.length)[:, :, -kept:].to(t.dtype), t], dim=2)
                for ring, t in ((state.keys, k), (state.values, v))
            )
        y = blockwise_local_attention(q, k, v, self.window)
        return self.out(rearrange(y, "b h n d -> b n (h d)")), after

    def step(
        self, x: Float[Tensor, "b e"], state: LocalState
    ) -> tuple[Float[Tensor, "b e"], LocalState]:
        q, k, v = rearrange(self.qkv(x), "b (three h d) -> three b h 1 d", three=3, h=self.n_heads)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        state = LocalState(
            ring_step(state.keys, k, state.length),
            ring_step(state.values, v, state.length),
            state.length + 1,
        )
        keys, values, visible = state.keys.to(q.dtype), state.values.to(q.dtype), None
        if isinstance(state.length, int):
            seen = min(state.length, self.window)
            keys, values = keys[:, :, :seen], values[:, :, :seen]
        else:
            visible = (torch.arange(self.window, device=q.device) < state.length).unsqueeze(0)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)
        return self.out(rearrange(y, "b h 1 d -> b (h d)")), state

    def initial_state(self, batch_size: int) -> LocalState:
        weight = self.qkv.weight
        keys = torch.zeros(
            (batch_size, self.n_heads, self.window, self.head_dim),
            dtype=torch.promote_types(weight.dtype, torch.float32),
            device=weight.device,
        )
        return LocalState(keys, keys.clone())
