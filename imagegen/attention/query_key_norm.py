"""Query-key normalisation (Henry et al., 2020), in the form of Dehghani et al. (2023).

Axes: `h` head, `n` position, `d` query/key feature.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-6


class QueryKeyNorm(nn.Module):
    """RMSNorm of the queries and of the keys of each head, with one weight a feature for all heads.

    What attention looks for is then bounded by the weights, however the inputs grow in training.

    Args:
        head_dim: features `d` of a query.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.ones(head_dim))
        self.key = nn.Parameter(torch.ones(head_dim))

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h n d"]
    ) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b h n d"]]:
        return _normalized(q, self.query), _normalized(k, self.key)


def _normalized(x: Tensor, weight: Tensor) -> Tensor:
    # Squares of half precision lose more than the layers around them do.
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), EPS).to(x.dtype)
