"""The contract that every output distribution keeps.

Axes: `b` batch, `e` model width, `p` parameters of the distribution, `u` uniform numbers a value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Float, Integer
from torch import Tensor, nn


class OutputHead(nn.Module, ABC):
    """Maps the model's output to a distribution over `levels` levels, scores it and draws from it.

    Args:
        d_model: width `e` of the model's output.
        levels: number of levels.
    """

    uniforms_per_value: ClassVar[int]
    """How many uniform numbers `sample` consumes for one value."""

    def __init__(self, d_model: int, levels: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.levels = levels

    @abstractmethod
    def forward(self, hidden: Float[Tensor, "... e"]) -> Float[Tensor, "... p"]:
        """Parameters of the distribution, in float32 at least."""

    @abstractmethod
    def log_prob(
        self, parameters: Float[Tensor, "*batch p"], value: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Natural logarithm of the probability of the level `value`, 0 to levels - 1."""

    @abstractmethod
    def log_probabilities(
        self, parameters: Float[Tensor, "*batch p"]
    ) -> Float[Tensor, "*batch levels"]:
        """Natural logarithm of the probability of every level."""

    @abstractmethod
    def _draw(
        self,
        parameters: Float[Tensor, "b p"],
        uniforms: Float[Tensor, "b u"],
        temperature: float,
    ) -> Integer[Tensor, "b"]:
        """`sample` for a positive temperature."""

    def sample(
        self,
        parameters: Float[Tensor, "b p"],
        uniforms: Float[Tensor, "b u"],
        temperature: float = 1.0,
    ) -> Integer[Tensor, "b"]:
        """Draw a level for each row, by inversion, from exactly what `log_prob` scores.

        Args:
            parameters: as `forward` gives them.
            uniforms: independent numbers in the open interval (0, 1), float64.
            temperature: 1 is the model's distribution, lower is more certain, 0 takes the most
                probable level (the lowest of them on a tie).

        Returns:
            int64 levels, 0 to levels - 1.
        """
        if temperature == 0:
            return self.log_probabilities(parameters).argmax(dim=-1)
        return self._draw(parameters.double(), uniforms, temperature)


def invert_cumulative(
    logits: Float[Tensor, "b k"], uniform: Float[Tensor, "b"]
) -> Integer[Tensor, "b"]:
    """Draw an index from softmax(logits) by inverting its cumulative sum."""
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    # Scaled by the total, which rounding may leave a little off 1, so that no index lies beyond.
    threshold = uniform.unsqueeze(-1) * cumulative[:, -1:]
    return (cumulative <= threshold).sum(dim=-1).clamp(max=logits.shape[-1] - 1)
