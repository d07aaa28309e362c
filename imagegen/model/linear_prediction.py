"""Linear prediction of the next values from the pixels around them, as lossless coders make it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.model.embeddings import InputEmbedding

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

    def __init__(self, embedding: InputEmbedding) -> None:
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
