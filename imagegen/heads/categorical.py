"""A free probability for each level (PixelRNN, van den Oord et al., 2016, section 3.5)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from imagegen.heads.base import OutputHead, invert_cumulative


class Categorical(OutputHead):
    """Softmax over the levels; the `p` parameters are the logits, one a level."""

    uniforms_per_value = 1

    def __init__(self, d_model: int, levels: int) -> None:
        super().__init__(d_model, levels)
        self.projection = nn.Linear(d_model, levels)

    def forward(self, hidden: Float[Tensor, "... e"]) -> Float[Tensor, "... p"]:
        logits = self.projection(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def log_prob(
        self, parameters: Float[Tensor, "*batch p"], value: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        log_probabilities = self.log_probabilities(parameters)
        return log_probabilities.gather(-1, value.long().unsqueeze(-1)).squeeze(-1)

    def log_probabilities(
        self, parameters: Float[Tensor, "*batch p"]
    ) -> Float[Tensor, "*batch levels"]:
        return parameters.log_softmax(dim=-1)

    def _draw(
        self,
        parameters: Float[Tensor, "b p"],
        uniforms: Float[Tensor, "b u"],
        temperature: float,
    ) -> Integer[Tensor, "b"]:
        return invert_cumulative(parameters / temperature, uniforms[:, 0])
