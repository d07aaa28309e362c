"""Short causal convolution of each feature over the last positions, before a recurrent attention.

Axes: `b` batch, `n` position, `f` feature, `t` tap, `r` the inputs that the next step still needs.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from imagegen.errors import UserError


class ShortConvolution(nn.Module):
    """y_i = sum_t w_t x_{i - size + 1 + t} for each feature by itself, without a bias.

    It is written as a sum over its few taps, which is exact under any batch size and length: what
    an image becomes does not depend on how it is computed.

    Args:
        features: number of features.
        size: taps; 0 leaves the input as it is.

    Raises:
        UserError: for a negative size.
    """

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        if size < 0:
            raise UserError(f"attention.conv_size={size} must be at least 0, for no convolution.")
        self.features = features
        self.size = size
        if size:
            # As nn.Conv1d(groups=features) starts.
            bound = 1 / math.sqrt(size)
            self.weight = nn.Parameter(torch.empty(size, features).uniform_(-bound, bound))

    def forward(
        self, x: Float[Tensor, "b n f"], recent: Float[Tensor, "b r f"]
    ) -> tuple[Float[Tensor, "b n f"], Float[Tensor, "b r f"]]:
        """Convolve, going on from the inputs before the first one; returns those to go on from."""
        if not self.size:
            return x, recent
        length = x.shape[1]
        window = torch.cat([recent, x], dim=1)
        weight = self.weight.to(x.dtype)
        y = weight[0] * window[:, :length]
        for tap in range(1, self.size):
            y = torch.addcmul(y, weight[tap], window[:, tap : tap + length])
        # A copy, for a view would keep the whole window in memory.
        return y, window[:, length:].clone()

    def initial_inputs(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "b r f"]:
        """The inputs before the first one: zeros."""
        return torch.zeros(
            batch_size, max(self.size - 1, 0), self.features, dtype=dtype, device=device
        )
