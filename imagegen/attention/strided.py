"""Strided sparse attention (Child et al., 2019): the row before, and the column above.

Axes: `b` batch, `n` position, `h` head, `d` query/key/value feature, `e` model width, `w` place in
the window, `k` key, `l` column, `r` row of a key, `a` row of a query.
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
from imagegen.attention.buffers import history_step, ring_after, ring_in_order, ring_step
from imagegen.attention.partial_softmax import PartialSoftmax, partial_softmax
from imagegen.attention.windows import joined, window_blocks
from imagegen.core.errors import UserError

COMBINATIONS = ("heads", "merged", "interleaved")
STRIDE_WITHOUT_ROWS = 128


@dataclass
class StridedState(AttentionState):
    """Keys and values, float32 at least: the last w for some heads, all for the others.

    Heads that see the last positions only keep a ring (see `buffers`). Those that see columns keep
    the history, in which the first `length` places are taken.
    """

    window_keys: Float[Tensor, "b window_heads w d"]
    window_values: Float[Tensor, "b window_heads w d"]
    column_keys: Float[Tensor, "b column_heads capacity d"]
    column_values: Float[Tensor, "b column_heads capacity d"]
    length: int = 0


def window_part(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h k d"],
    v: Float[Tensor, "b h k d"],
    window: int,
) -> PartialSoftmax:
    """Attention over the last `window` keys; k and v may begin before the first query."""
    blocks = window_blocks(q, k, v, window)
    part = partial_softmax(blocks.q @ blocks.k.mT, blocks.visible, blocks.v)
    return part.map(lambda t: joined(t, q.shape[2]))


def column_part(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h k d"],
    v: Float[Tensor, "b h k d"],
    stride: int,
    nearest: int = 0,
) -> PartialSoftmax:
    """Attention over the positions j = i - stride * m with m >= `nearest`.

    Args:
        q: queries, of the last n of the k positions.
        k, v: keys and values of all positions.
        stride: length of a row.
        nearest: 0 to see the own position and all above it, 1 to leave it out, and so on.
    """
    length, total = q.shape[2], k.shape[2]
    after = -total % stride
    first_row, before = divmod(total - length, stride)
    q = rearrange(F.pad(q, (0, 0, before, after)), "b h (a l) d -> b h l a d", l=stride)
    k, v = (
        rearrange(F.pad(t, (0, 0, 0, after)), "b h (r l) d -> b h l r d", l=stride) for t in (k, v)
    )
    row = torch.arange(q.shape[3], device=q.device).unsqueeze(-1) + first_row
    visible = row - torch.arange(k.shape[3], device=q.device) >= nearest
    part = partial_softmax(q @ k.mT, visible, v)
    return part.map(
        lambda t: rearrange(t, "b h l a m -> b h (a l) m")[:, :, before : before + length]
    )


class StridedAttention(CausalAttention[StridedState]):
    """Multi-head strided sparse attention, attend(X, S) (section 4.2, eq. 2 to 4).

        a(x_i, S_i) = softmax((W_q x_i) K_Si^T / sqrt(d)) V_Si
        K_Si = (W_k x_j), V_Si = (W_v x_j) for all j in S_i

    The patterns S are those of section 4.3. With l the length of a row, position i sees
    A1 = {max(0, i - l), ..., i}, the row before it, or A2 = {j <= i: (i - j) mod l = 0}, its own
    column. Any two positions are then joined by a path of two steps. The parallel form takes time
    n (l + n / l), so it is linear in the length while the number of rows is fixed, and n^(3/2) for
    square images.

    The state is of constant size where only A1 is seen. A column reaches up to the first row, and
    the columns together hold every position: heads that see A2 keep all keys and values. Their
    state grows with every step, whatever the width of the images, up to the size of a whole image.
    So `strided` is not among the mechanisms that are run for 65,536 steps in a state of constant
    size (benchmarks/results/stability.md). A step nevertheless reads l + n / l positions only.

    Args:
        combine: how the two patterns are combined (section 5.1): `heads`, the first half of the
            heads sees A1 and the others A2 (eq. 8); `merged`, all heads see both (eq. 7);
            `interleaved`, layers 0, 2, ... see A1 and the others A2 (eq. 6).
        stride: l; None for the row length of the images or, where that is not known either, 128,
            the paper's for text.
        context: see `CausalAttention`.

    Raises:
        UserError: for an unknown combination, `heads` with a single head, a stride below one.
    """

    constant_state = False
    needs_raster = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        combine: str = "heads",
        stride: int | None = None,
        **context: Any,
    ) -> None:
        super().__init__(d_model, n_heads, head_dim, **context)
        if combine not in COMBINATIONS:
            raise UserError(
                f"attention.combine={combine} is unknown; choose one of {', '.join(COMBINATIONS)}."
            )
        if combine == "heads" and n_heads < 2:
            raise UserError(
                "attention.combine=heads gives rows and columns heads of their own and needs "
                f"n_heads of at least 2, not {n_heads}; choose merged or interleaved instead."
            )
        if stride is None:
            stride = self.row_length or STRIDE_WITHOUT_ROWS
        if stride < 1:
            raise UserError(f"attention.stride={stride} must be at least 1.")
        self.stride = stride
        self.merged = combine == "merged"
        if combine == "heads":
            self.window_heads = n_heads // 2
        else:
            self.window_heads = n_heads if combine == "interleaved" and self.layer % 2 == 0 else 0
        inner = self.n_heads * self.head_dim
        self.qkv = nn.Linear(d_model, 3 * inner)
        self.out = nn.Linear(inner, d_model)

    def forward(
        self, x: Float[Tensor, "b n e"], state: StridedState | None = None
    ) -> tuple[Float[Tensor, "b n e"], StridedState]:
        q, k, v = rearrange(
            self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.n_heads
        )
        state = state or self.initial_state(x.shape[0])
        length, heads = state.length, self.window_heads
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = self._scaled(q, k, v)
            kept = min(length, self.stride)
            window_k, window_v = (
                torch.cat([ring_in_order(ring, length)[:, :, self.stride + 1 - kept :], t], dim=2)
                for ring, t in (
                    (state.window_keys, k[:, :heads]),
                    (state.window_values, v[:, :heads]),
                )
            )
            column_k = torch.cat([state.column_keys[:, :, :length], k[:, heads:]], dim=2)
            column_v = torch.cat([state.column_values[:, :, :length], v[:, heads:]], dim=2)
            y = torch.cat(
                [
                    self._row_before(q[:, :heads], window_k, window_v).result(),
                    self._columns(q[:, heads:], column_k, column_v).result(),
                ],
                dim=1,
            )
        state = StridedState(
            ring_after(state.window_keys, k[:, :heads], length),
            ring_after(state.window_values, v[:, :heads], length),
            column_k,
            column_v,
            length + x.shape[1],
        )
        return self.out(rearrange(y, "b h n d -> b n (h d)").to(x.dtype)), state

    def step(
        self, x: Float[Tensor, "b e"], state: StridedState
    ) -> tuple[Float[Tensor, "b e"], StridedState]:
        q, k, v = rearrange(self.qkv(x), "b (three h d) -> three b h 1 d", three=3, h=self.n_heads)
        position, heads = state.length, self.window_heads
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = self._scaled(q, k, v)
            state = StridedState(
                ring_step(state.window_keys, k[:, :heads], position),
                ring_step(state.window_values, v[:, :heads], position),
                history_step(state.column_keys, k[:, heads:], position),
                history_step(state.column_values, v[:, heads:], position),
                position + 1,
            )
            ring = slice(0, min(position, self.stride) + 1)
            groups = (
                (
                    q[:, :heads],
                    state.window_keys[:, :, ring],
                    state.window_values[:, :, ring],
                ),
                (
                    q[:, heads:],
                    self._seen(state.column_keys, position),
                    self._seen(state.column_values, position),
                ),
            )
            # A group may have no heads; PyTorch 2.9 then divides by zero, which ends the process.
            y = torch.cat(
                [
                    F.scaled_dot_product_attention(*group, scale=1)
                    for group in groups
                    if group[0].shape[1] > 0
                ],
                dim=1,
            )
        return self.out(rearrange(y, "b h 1 d -> b (h d)").to(x.dtype)), state

    def initial_state(self, batch_size: int) -> StridedState:
        weight = self.qkv.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        window = torch.zeros(
            (batch_size, self.window_heads, self.stride + 1, self.head_dim),
            dtype=dtype,
            device=weight.device,
        )
        column = window.new_zeros(batch_size, self.n_heads - self.window_heads, 0, self.head_dim)
        return StridedState(window, window.clone(), column, column.clone())

    def _row_before(self, q: Tensor, k: Tensor, v: Tensor) -> PartialSoftmax:
        return window_part(q, k, v, self.stride + 1)

    def _columns(self, q: Tensor, k: Tensor, v: Tensor) -> PartialSoftmax:
        if not self.merged:
            return column_part(q, k, v, self.stride)
        # The position itself and the one above it are in the row before, too.
        return self._row_before(q, k, v).merged(column_part(q, k, v, self.stride, nearest=2))

    def _seen(self, history: Tensor, position: int) -> Tensor:
        """The keys or values of the history that the heads which see columns see at `position`."""
        if not self.merged:
            return history[:, :, position % self.stride : position + 1 : self.stride]
        row = history[:, :, max(0, position - self.stride) : position + 1]
        above = history[
            :, :, position % self.stride : max(0, position - 2 * self.stride + 1) : self.stride
        ]
        return torch.cat([above, row], dim=2)

    def _scaled(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        return q.to(dtype) / math.sqrt(self.head_dim), k.to(dtype), v.to(dtype)
