"""A linear prediction of the next values from those seen.

Axes: `b` batch, `n` position, `s` values per step, `f` numbers seen, `k` pattern.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.model.embeddings import InputEmbedding
from imagegen.model.known_neighbourhood import ADJACENT, KnownNeighbourhood

# Least squares over small photographs, rounded; their sum is 1.
FIRST_WEIGHTS = {(0, -1): 0.8, (-1, 0): 0.6, (-1, -1): -0.5, (-1, 1): 0.1}


class LinearPrediction(nn.Module):
    """A linear function of the numbers that the embedding sees, for each value of a step.

    What the output distribution has to add is then as small as the residual of a predictive coder,
    from the first training step on. At first each value is predicted from the same channel of the
    pixels to the left and above, and from no more of them than the embedding sees.

    Args:
        embedding: gives the numbers `f`.

    Attributes:
        weight: "s f".
    """

    def __init__(self, embedding: InputEmbedding[Any]) -> None:
        super().__init__()
        values, lags = embedding.raster.values_per_step, embedding.neighbour_lags
        self.weight = nn.Parameter(torch.zeros(values, embedding.n_numbers))
        with torch.no_grad():
            for offset, weight in FIRST_WEIGHTS.items():
                lag = embedding.lag(*offset)
                if lag in lags:
                    first = lags.index(lag) * values
                    self.weight[:, first : first + values].fill_diagonal_(weight)

    def forward(self, numbers: Float[Tensor, "b n f"]) -> Float[Tensor, "b n s"]:
        """Values from -1 to 1 or a little beyond.

        Args:
            numbers: that the embedding gives.
        """
        with torch.autocast(numbers.device.type, enabled=False):  # see `OutputHead.forward`
            return F.linear(numbers, self.weight)


class KnownPrediction(LinearPrediction):
    """A linear prediction for each pattern of known pixels among the four adjacent ones.

    One linear function cannot serve a pixel between two known ones as well as a pixel with none
    below. At first the weights of the raster are taken where just the pixels to the left and above
    are known, and the mean of the known ones in every other pattern.

    Attributes:
        weight: "k*s f"; bit i of the pattern is `ADJACENT[i]`.
    """

    def __init__(self, embedding: KnownNeighbourhood) -> None:
        super().__init__(embedding)
        self.adjacent = embedding.adjacent
        self.values = values = embedding.raster.values_per_step
        first = self.weight.detach()
        patterns = torch.zeros(1 << len(ADJACENT), *first.shape)
        for pattern in range(1, len(patterns)):
            known = [k for i, k in enumerate(self.adjacent) if pattern >> i & 1 and k >= 0]
            for k in known:
                own = patterns[pattern, :, k * values : (k + 1) * values]
                own.fill_diagonal_(1 / len(known))
        patterns[0b0011] = first
        self.weight = nn.Parameter(patterns.flatten(0, 1))
        self.flags = embedding.n_numbers - embedding.n_numbers // (values + 1)

    def forward(self, numbers: Float[Tensor, "b n f"]) -> Float[Tensor, "b n s"]:
        every = super().forward(numbers).unflatten(-1, (-1, self.values))
        pattern = torch.zeros(numbers.shape[:2], dtype=torch.int64, device=numbers.device)
        for bit, k in enumerate(self.adjacent):
            if k >= 0:
                pattern = pattern + (numbers[..., self.flags + k] > 0).long() * (1 << bit)
        index = pattern[..., None, None].expand(-1, -1, 1, self.values)
        return every.gather(2, index).squeeze(2)
