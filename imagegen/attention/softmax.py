"""Scaled dot product attention (Vaswani et al., 2017), with a key/value cache in generation.

Axes: `b` batch, `n` position, `h` head, `d` query/key/value feature, `e` model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.attention.base import AttentionState, CausalAttention
from imagegen.attention.buffers import history_step
from imagegen.attention.query_key_norm import QueryKeyNorm


@dataclass
class SoftmaxState(AttentionState):
    """Keys and values of all positions so far: the first `length` of the allocated ones."""

    keys: Float[Tensor, "b h capacity d"]
    values: Float[Tensor, "b h capacity d"]
    length: int = 0


class SoftmaxAttention(CausalAttention[SoftmaxState]):
    """Multi-head causal softmax attention (Vaswani et al., 2017, eq. 1).

        Attention(Q, K, V) = softmax(Q K^T / sqrt(d)) V

    over the positions up to each one (the mask of section 3.2.3).

    Args:
        qk_norm: whether queries and keys pass a `QueryKeyNorm` first.
        context: see `CausalAttention`.
    """

    constant_state = False

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        qk_norm: bool = False,
        **context: Any,
    ) -> None:
        super().__init__(d_model, n_heads, head_dim, **context)
        inner = self.n_heads * self.head_dim
        self.qkv = nn.Linear(d_model, 3 * inner)
        self.out = nn.Linear(inner, d_model)
        self.qk_norm = QueryKeyNorm(self.head_dim) if qk_norm else None

    def forward(
        self, x: Float[Tensor, "b n e"], state: SoftmaxState | None = None
    ) -> tuple[Float[Tensor, "b n e"], SoftmaxState]:
        q, k, v = rearrange(
            self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.n_heads
        )
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        if state is None or state.length == 0:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k = torch.cat([state.keys[:, :, : state.length], k], dim=2)
            v = torch.cat([state.values[:, :, : state.length], v], dim=2)
            visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible.tril(state.length))
        y = self.out(rearrange(y, "b h n d -> b n (h d)"))
        return y, SoftmaxState(k, v, k.shape[2])

    def step(
        self, x: Float[Tensor, "b e"], state: SoftmaxState
    ) -> tuple[Float[Tensor, "b e"], SoftmaxState]:
        q, k, v = rearrange(self.qkv(x), "b (three h d) -> three b h 1 d", three=3, h=self.n_heads)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        length = state.length + 1
        keys = history_step(state.keys, k, state.length)
        values = history_step(state.values, v, state.length)
        y = F.scaled_dot_product_attention(q, keys[:, :, :length], values[:, :, :length])
        return self.out(rearrange(y, "b h 1 d -> b (h d)")), SoftmaxState(keys, values, length)

    def initial_state(self, batch_size: int) -> SoftmaxState:
        weight = self.qkv.weight
        empty = weight.new_zeros(batch_size, self.n_heads, 0, self.head_dim)
        return SoftmaxState(empty, empty.clone(), 0)
