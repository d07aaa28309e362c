"""Discretized mixture of logistics (PixelCNN++, Salimans et al., 2017, section 2.1).

Levels 0 to L - 1 lie at x = -1 to 1; level x has the mass that the mixture puts on the bin
(x - 1 / (L - 1), x + 1 / (L - 1)), and the two bins at the ends are open tails.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.errors import UserError
from imagegen.heads.base import OutputHead, invert_cumulative

MIN_LOG_SCALE = -7.0
MAX_LOG_SCALE = 7.0
MAX_MEAN = 1e4


class MixtureOfLogistics(OutputHead):
    """A mixture of `n_mixtures` logistics; the parameters are k logits, k means, k log-scales.

    Log-scales are clamped to -7 (the paper's bound) to 7, means to +-10,000: a bin then has a mass
    that float32 can hold, and the sampler uses the same bounds.

    Raises:
        UserError: for fewer than one component.
    """

    uniforms_per_value = 2

    def __init__(self, d_model: int, levels: int, n_mixtures: int = 10) -> None:
        super().__init__(d_model, levels)
        if n_mixtures < 1:
            raise UserError(f"head.n_mixtures={n_mixtures} must be at least 1.")
        self.n_mixtures = n_mixtures
        self.projection = nn.Linear(d_model, 3 * n_mixtures)
        with torch.no_grad():
            logits, means, log_scales = self.projection.bias.chunk(3)
            logits.zero_()
            means.copy_((torch.arange(n_mixtures) + 0.5) / n_mixtures * 2 - 1)
            log_scales.fill_(-math.log(n_mixtures))

    def forward(self, hidden: Float[Tensor, "... e"]) -> Float[Tensor, "... p"]:
        parameters = self.projection(hidden)
        return parameters.to(torch.promote_types(parameters.dtype, torch.float32))

    def log_prob(
        self, parameters: Float[Tensor, "*batch p"], value: Integer[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        logits, means, log_scales = self._split(parameters)
        value = value.unsqueeze(-1).to(means.dtype)
        half_bin = 1 / (self.levels - 1)
        inverse_scales = (-log_scales).exp()
        # The edge between two bins is computed alike from both sides: what one bin loses by
        # rounding, its neighbour gains, and the sum stays 1.
        upper = ((2 * value + 1) * half_bin - 1 - means) * inverse_scales
        lower = ((2 * value - 1) * half_bin - 1 - means) * inverse_scales
        # log(sigmoid(a) - sigmoid(b)) = log sigmoid(a) + log sigmoid(-b) + log(1 - exp(b - a)),
        # where a - b = 2 half_bin / scale exactly. The top level's bin has sigmoid(a) = 1 and the
        # bottom level's has sigmoid(b) = 0, so each of them keeps one of the first two terms.
        top, bottom = value == self.levels - 1, value == 0
        below = F.logsigmoid(upper).masked_fill(top, 0.0)
        above = F.logsigmoid(-lower).masked_fill(bottom, 0.0)
        width = (-torch.expm1(-2 * half_bin * inverse_scales)).log()
        width = width.expand_as(below).masked_fill(top | bottom, 0.0)
        log_mass = below + above + width
        return torch.logsumexp(logits.log_softmax(dim=-1) + log_mass, dim=-1)

    def log_probabilities(
        self, parameters: Float[Tensor, "*batch p"]
    ) -> Float[Tensor, "*batch levels"]:
        levels = torch.arange(self.levels, device=parameters.device)
        batch = parameters.shape[:-1]
        return self.log_prob(
            parameters.unsqueeze(-2).expand(*batch, self.levels, -1),
            levels.expand(*batch, self.levels),
        )

    def _draw(
        self,
        parameters: Float[Tensor, "b p"],
        uniforms: Float[Tensor, "b u"],
        temperature: float,
    ) -> Integer[Tensor, "b"]:
        logits, means, log_scales = self._split(parameters)
        component = invert_cumulative(logits / temperature, uniforms[:, 0]).unsqueeze(-1)
        mean = means.gather(-1, component).squeeze(-1)
        scale = log_scales.gather(-1, component).squeeze(-1).exp()
        x = mean + scale * temperature * torch.logit(uniforms[:, 1])
        level = (x + 1) / 2 * (self.levels - 1)
        return level.round().clamp(0, self.levels - 1).long()

    @staticmethod
    def _split(parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, means, log_scales = rearrange(parameters, "... (three k) -> three ... k", three=3)
        means = means.clamp(-MAX_MEAN, MAX_MEAN)
        return logits, means, log_scales.clamp(MIN_LOG_SCALE, MAX_LOG_SCALE)
