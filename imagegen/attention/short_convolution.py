"""The short causal convolution that many linear mechanisms put before their queries and keys.

It is that of Mamba (Gu and Dao, 2023), which DeltaNet and its successors took over.

Axes: `b` batch, `n` position, `w` inputs kept, one fewer than the convolution sees.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.core.errors import UserError


class ShortConvolution(nn.Module):
    """silu(bias + sum_j w_j x_(t+1-size+j)), j from 0 to size - 1, each channel on its own.

    Args:
        channels: number of channels.
        size: positions that are seen, this one included; 0 passes the input on as it is.
        bias: whether a bias is added.

    Raises:
        UserError: for a negative size.
    """

    def __init__(self, channels: int, size: int, bias: bool = False) -> None:
        super().__init__()
        if size < 0:
            raise UserError(f"attention.conv_size={size} must be at least 1, or 0 for none.")
        self.channels = channels
        self.size = size
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if size:
            # As torch.nn.Conv1d starts.
            bound = 1 / math.sqrt(size)
            self.weight = nn.Parameter(torch.empty(size, channels).uniform_(-bound, bound))
            if bias:
                self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))

    def initial_state(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "b w {self.channels}"]:
        """The inputs before the first one: zeros."""
        kept = max(self.size - 1, 0)
        return torch.zeros(batch_size, kept, self.channels, dtype=dtype, device=device)

    def forward(
        self,
        x: Float[Tensor, "b n {self.channels}"],
        before: Float[Tensor, "b w {self.channels}"],
    ) -> tuple[Float[Tensor, "b n {self.channels}"], Float[Tensor, "b w {self.channels}"]]:
        """Continue from the inputs `before`; returns those to keep for the next call as well."""
        if self.weight is None:
            return x, before
        window = torch.cat([before, x], dim=1)
        y = x.new_zeros(()) if self.bias is None else self.bias
        for j in range(self.size):
            y = y + self.weight[j] * window[:, j : j + x.shape[1]]
        # A copy, so that the state does not hold on to the whole sequence.
        return F.silu(y), window[:, x.shape[1] :].clone()
