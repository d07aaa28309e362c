"""Softmax attention that is gathered from parts of the keys.

Axes: `q` query, `k` key, `m` value feature, `r` part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass
class PartialSoftmax:
    """Softmax attention over a part of the keys, before the division.

    With scores s, the sums are of exp(s - maximum) and of exp(s - maximum) v. A query that sees no
    key has the sums 0.
    """

    maximum: Float[Tensor, "... q"]
    denominator: Float[Tensor, "... q"]
    numerator: Float[Tensor, "... q m"]

    def map(self, function: Callable[[Tensor], Tensor]) -> PartialSoftmax:
        """Apply `function` to "... q m", and to the other two as "... q 1"."""
        return PartialSoftmax(
            function(self.maximum.unsqueeze(-1)).squeeze(-1),
            function(self.denominator.unsqueeze(-1)).squeeze(-1),
            function(self.numerator),
        )

    def merged(self, other: PartialSoftmax) -> PartialSoftmax:
        """The part of the keys of both, which have none in common."""
        maximum = torch.maximum(self.maximum, other.maximum)
        mine = (self.maximum - maximum).exp()
        others = (other.maximum - maximum).exp()
        return PartialSoftmax(
            maximum,
            mine * self.denominator + others * other.denominator,
            mine.unsqueeze(-1) * self.numerator + others.unsqueeze(-1) * other.numerator,
        )

    def result(self) -> Float[Tensor, "... q m"]:
        """The weighted mean of the values; every query must see a key."""
        return self.numerator / self.denominator.unsqueeze(-1)

    def result_or(self, alone: Float[Tensor, "... q m"]) -> Float[Tensor, "... q m"]:
        """The weighted mean of the values, or `alone` for queries that see no key."""
        nothing = self.denominator == 0
        # Divides by one there, because a division by zero would spoil the gradient.
        mean = self.numerator / self.denominator.masked_fill(nothing, 1).unsqueeze(-1)
        return torch.where(nothing.unsqueeze(-1), alone, mean)


def partial_softmax(
    scores: Float[Tensor, "... q k"],
    visible: Bool[Tensor, "... q k"],
    values: Float[Tensor, "... k m"],
) -> PartialSoftmax:
    """Softmax attention over the keys that are `visible`."""
    scores = scores.masked_fill(~visible, -torch.inf)
    # The maximum cancels in the division, and therefore needs no gradient. The least finite number
    # means "no key", because -inf - -inf would be nan.
    maximum = scores.detach().amax(dim=-1).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - maximum.unsqueeze(-1)).exp()
    return PartialSoftmax(maximum, weights.sum(dim=-1), weights @ values)
