"""A causal convolution that reaches the rows above, in a state of constant size.

Axes: `b` batch, `n` position, `w` position in a window, `e` model width, `k` tap of the kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.attention.base import AttentionState, Position
from imagegen.core.errors import UserError


@dataclass
class RowState(AttentionState):
    """The last inputs, as many as the kernel reaches back, and the number of inputs so far."""

    recent: Float[Tensor, "b w e"]
    position: Position = 0


class RowConvolution(nn.Module):
    """A depthwise convolution over the earlier positions around each one, in two dimensions.

    As the masked convolutions of PixelCNN (van den Oord et al., 2016), it sees `rows` rows above,
    `columns` positions to each side there, and as many to the left in its own row, and the position
    itself. Nothing is seen across the ends of rows. The state keeps the last rows: its size depends
    on the length of a row, never on that of the sequence.

    Args:
        d_model: width `e`.
        row_length: positions in a row.
        rows: rows above that are seen, 0 or more.
        columns: positions to each side, 0 or more.

    Raises:
        UserError: for a negative reach, or a kernel of the position alone.
    """

    def __init__(self, d_model: int, row_length: int, rows: int, columns: int) -> None:
        super().__init__()
        if rows < 0 or columns < 0 or rows + columns == 0:
            raise UserError(
                f"model.convolution=[{rows},{columns}] must be [rows, columns]: 0 or more rows "
                "above and positions to each side, and not both 0."
            )
        self.row_length = row_length
        self.rows = rows
        # Beyond a row's length there is nothing to see.
        self.columns = columns = min(columns, row_length - 1)
        self.lookback = rows * row_length + columns
        self.weight = nn.Parameter(torch.zeros(d_model, rows + 1, 2 * columns + 1))
        self.bias = nn.Parameter(torch.zeros(d_model))
        bound = 1 / math.sqrt((rows + 0.5) * (2 * columns + 1))
        nn.init.uniform_(self.weight, -bound, bound)
        seen = torch.ones(rows + 1, 2 * columns + 1)
        seen[-1, columns + 1 :] = 0
        self.register_buffer("seen", seen, persistent=False)
        # All places of the kernel but the last ones, right of the position itself.
        tap = torch.arange(rows * (2 * columns + 1) + columns + 1)
        shift = tap % (2 * columns + 1) - columns
        lag = (rows - tap // (2 * columns + 1)) * row_length - shift
        self.register_buffer("shift", shift, persistent=False)
        self.register_buffer("lag", lag, persistent=False)
        self.register_buffer("tap", tap, persistent=False)

    def forward(
        self, x: Float[Tensor, "b n e"], state: RowState | None = None
    ) -> tuple[Float[Tensor, "b n e"], RowState]:
        """All positions at once, continuing from `state`."""
        state = state or self.initial_state(x.shape[0])
        window = torch.cat([state.recent.to(x.dtype), x], dim=1)
        # Whole rows: what precedes the window is filled with zeros, and so is its last row.
        first = state.position - self.lookback
        before = first % self.row_length
        after = -(before + window.shape[1]) % self.row_length
        grid = rearrange(
            F.pad(window, (0, 0, before, after)), "b (r c) e -> b e r c", c=self.row_length
        )
        kernel = (self.weight * cast(Tensor, self.seen)).unsqueeze(1)
        grid = F.pad(grid, (self.columns, self.columns, self.rows, 0))
        y = F.conv2d(grid, kernel.to(grid.dtype), self.bias.to(grid.dtype), groups=len(kernel))
        start = before + self.lookback
        y = rearrange(y, "b e r c -> b (r c) e")[:, start : start + x.shape[1]]
        recent = window[:, window.shape[1] - self.lookback :]
        return y, RowState(recent.to(state.recent.dtype), state.position + x.shape[1])

    def step(
        self, x: Float[Tensor, "b e"], state: RowState
    ) -> tuple[Float[Tensor, "b e"], RowState]:
        """One position."""
        window = torch.cat([state.recent, x.unsqueeze(1).to(state.recent.dtype)], dim=1)
        column = state.position % self.row_length + cast(Tensor, self.shift)
        inside = (column >= 0) & (column < self.row_length)
        weight = self.weight.flatten(1)[:, cast(Tensor, self.tap)] * inside
        seen = window[:, self.lookback - cast(Tensor, self.lag)]
        y = (seen * weight.T).sum(dim=1) + self.bias
        return y.to(x.dtype), RowState(window[:, 1:], state.position + 1)

    def initial_state(self, batch_size: int) -> RowState:
        """The state before the first position."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return RowState(
            torch.zeros(
                batch_size,
                self.lookback,
                len(self.weight),
                dtype=dtype,
                device=self.weight.device,
            )
        )
