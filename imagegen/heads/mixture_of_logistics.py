"""Discretized mixture of logistics (PixelCNN++, Salimans et al., 2017), and of a softmax.

Levels 0 to L - 1 are at x = -1 to 1; level x has the mass that a logistic puts on the bin
(x - 1 / (L - 1), x + 1 / (L - 1)), and the two bins at the ends are open tails. The softmax has a
free probability for each level: it can say that 253 is frequent and 251 is not, which no logistic
can.

Axes beside those of `base`: `k` logistic, `c` component of either kind, `v` level.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.core.errors import UserError
from imagegen.heads.base import OutputHead, invert_cumulative
from imagegen.heads.controls import Controls, nucleus, tempered

MIN_LOG_SCALE = -7.0
MAX_LOG_SCALE = 7.0
MAX_MEAN = 1e4
# Unit of the means around a prediction, in halves of a level, or 1 where that is less. They have to
# be right to a narrow component's width, which levels limit, and an optimizer like Adam moves all
# outputs of the projection about as far in a step.
RESIDUAL_UNIT = 51
SOFTMAX_LOGIT = -3.0
"""Of the softmax at first, beside 0 of each logistic: half of the probability costs colour images
more than the softmax is worth to them at the beginning."""


class MixtureOfLogistics(OutputHead):
    """A mixture of `n_mixtures` logistics, or of products of one per channel, and of a softmax.

    All values of a step come from one component of the mixture (section 2.2): a logistic's mean of
    a value is linear in the values before it, mean_s + sum over r < s of tanh(c_sr) x_r, x in
    [-1, 1]. With `categorical`, one component more is a softmax over the levels for each value of a
    step, whatever its other values are. The parameters are the logits of the components, with
    `categorical` those of s x levels, s k means, s k log-scales and s (s - 1) / 2 k coefficients c.

    Log-scales are clamped to -7 (the bound of Katharopoulos et al., 2020) to 7, means to +-10,000:
    a bin then has a mass that float32 can hold, and the sampler uses the same bounds.

    With a prediction y of the values, the means and the values before are counted from it, as the
    residuals of a predictive coder: the mean of a value is y_s + unit mean_s + sum over r < s of
    tanh(c_sr) (x_r - y_r). `forward` puts that into the means, so that all else is as without.

    Args:
        n_mixtures: logistics, at least 1.
        categorical: whether the mixture has the softmax too.

    Attributes:
        residual_unit: the unit, 0.2 for 256 levels and 1 for 52 or fewer.
        n_logits: of the components, and of the softmax's levels.

    Raises:
        UserError: for fewer than one logistic.
    """

    takes_prediction = True

    def __init__(
        self,
        d_model: int,
        levels: int,
        values_per_step: int = 1,
        n_mixtures: int = 10,
        categorical: bool = False,
    ) -> None:
        super().__init__(d_model, levels, values_per_step)
        if n_mixtures < 1:
            raise UserError(f"head.n_mixtures={n_mixtures} must be at least 1.")
        self.n_mixtures, self.categorical = n_mixtures, categorical
        self.n_components = n_mixtures + categorical
        self.n_logits = self.n_components + categorical * values_per_step * levels
        self.residual_unit = min(1.0, RESIDUAL_UNIT / max(1, levels - 1))
        n_coefficients = values_per_step * (values_per_step - 1) // 2
        self._parts = (values_per_step, values_per_step, n_coefficients)
        self.projection = nn.Linear(d_model, sum(self._parts) * n_mixtures + self.n_logits)
        with torch.no_grad():
            logits, softmax, means, log_scales, coefficients = self._divide(self.projection.bias)
            # All logistics alike, and little of the softmax, all of whose levels are.
            logits[..., :n_mixtures], logits[..., n_mixtures:] = 0, SOFTMAX_LOGIT
            softmax.zero_()
            means.copy_((torch.arange(n_mixtures) + 0.5) / n_mixtures * 2 - 1)
            log_scales.fill_(-math.log(n_mixtures))
            coefficients.zero_()

    def start_from_prediction(self) -> None:
        """Components of several widths at the prediction; a channel errs as the one before it."""
        with torch.no_grad():
            # The softmax is as quick to learn as without a prediction.
            self.projection.weight[: self.n_mixtures].mul_(0.1)
            self.projection.weight[self.n_logits :].mul_(0.1)
            *_, means, log_scales, coefficients = self._divide(self.projection.bias)
            # Equal components would stay equal.
            means.normal_(std=0.02 / self.residual_unit)
            log_scales.copy_(torch.linspace(-1.5, -4.0, self.n_mixtures).expand_as(log_scales))
            coefficients.zero_()
            for s in range(1, self.values_per_step):
                coefficients[s * (s + 1) // 2 - 1] = math.atanh(0.8)

    @property
    def uniforms_per_step(self) -> int:
        return 1 + self.values_per_step

    def log_prob(
        self, parameters: Float[Tensor, "*batch p"], values: Integer[Tensor, "*batch s"]
    ) -> Float[Tensor, "*batch s"]:
        logits, softmax, means, log_scales, coefficients = self._bounded(parameters)
        means = self._shifted(means, coefficients, self._scaled(values, means))
        log_mass = self._log_mass(means, log_scales, values.unsqueeze(-1))
        log_mass = self._with_softmax(log_mass, softmax, values)
        if self.values_per_step == 1:
            return (logits.log_softmax(dim=-1) + log_mass).logsumexp(dim=-1)
        # p(values up to s) with each component, its choice included.
        joint = (logits.log_softmax(dim=-1) + log_mass.cumsum(dim=-2)).logsumexp(dim=-1)
        return torch.cat([joint[..., :1], joint.diff(dim=-1)], dim=-1)

    def log_probabilities(
        self,
        parameters: Float[Tensor, "*batch p"],
        given: Integer[Tensor, "*batch g"] | None = None,
    ) -> Float[Tensor, "*batch levels"]:
        logits, softmax, means, log_scales, coefficients = self._bounded(parameters)
        logits = logits.squeeze(-2)
        known = 0 if given is None else given.shape[-1]
        if given is not None and known:
            x = F.pad(self._scaled(given, means), (0, 0, 0, self.values_per_step - known))
            means = self._shifted(means, coefficients, x)
            seen = (..., slice(0, known), slice(None))
            log_mass = self._log_mass(means[seen], log_scales[seen], given.unsqueeze(-1))
            log_mass = self._with_softmax(log_mass, softmax[..., :known, :], given)
            logits = logits + log_mass.sum(dim=-2)
        levels = torch.arange(self.levels, device=parameters.device).unsqueeze(-1)
        following = (..., slice(known, known + 1), slice(None))
        log_mass = self._log_mass(means[following], log_scales[following], levels)
        weights = logits.log_softmax(dim=-1)
        of_logistics, of_softmax = weights.tensor_split([self.n_mixtures], dim=-1)
        found = (of_logistics.unsqueeze(-2) + log_mass).logsumexp(dim=-1)
        if not self.categorical:
            return found
        return torch.logaddexp(found, of_softmax + softmax[..., known, :].log_softmax(dim=-1))

    def _draw(
        self,
        parameters: Float[Tensor, "b p"],
        uniforms: Float[Tensor, "b u"],
        controls: Controls,
    ) -> Integer[Tensor, "b s"]:
        logits, softmax, means, log_scales, coefficients = self._bounded(parameters)
        logits = nucleus(tempered(logits.squeeze(-2), controls.for_mixture), controls.top_p)
        component = invert_cumulative(logits, uniforms[:, 0])
        chosen = component.clamp(max=self.n_mixtures - 1).view(-1, 1, 1)
        means, log_scales, coefficients = (
            t.take_along_dim(chosen, dim=-1) for t in (means, log_scales, coefficients)
        )
        noise = controls.for_scale * log_scales.exp() * torch.logit(uniforms[:, 1:, None])
        levels = torch.zeros_like(means)
        for s in range(self.values_per_step):
            # The values that are still to be drawn do not enter into the mean of this one.
            x = self._shifted(means, coefficients, self._scaled(levels.squeeze(-1), means)) + noise
            drawn = (x[:, s] + 1) / 2 * (self.levels - 1)
            levels[:, s] = drawn.round().clamp(0, self.levels - 1)
        levels = levels.squeeze(-1).long()
        if not self.categorical:
            return levels
        scores = tempered(softmax.flatten(0, 1), controls.for_scale)
        scores = nucleus(scores, controls.top_p)
        drawn = invert_cumulative(scores, uniforms[:, 1:].flatten()).view_as(levels)
        return torch.where((component < self.n_mixtures).unsqueeze(-1), levels, drawn)

    def _with_softmax(self, log_mass: Tensor, softmax: Tensor, levels: Tensor) -> Tensor:
        """Log-probabilities "... s c" of levels "... s", of those "... s k" under the logistics."""
        if not self.categorical:
            return log_mass
        column = softmax.log_softmax(dim=-1).gather(-1, levels.unsqueeze(-1).long())
        return torch.cat([log_mass, column], dim=-1)

    def _log_mass(self, means: Tensor, log_scales: Tensor, levels: Tensor) -> Tensor:
        """Log-probability "... k" of levels "... 1" under each logistic."""
        value = levels.to(means.dtype)
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
        return below + above + width

    def _shifted(self, means: Tensor, coefficients: Tensor, x: Tensor) -> Tensor:
        """Means "... s k", each given the earlier ones of the values "... s 1" of the step."""
        rows, first = [means[..., :1, :]], 0
        for s in range(1, self.values_per_step):
            weights = coefficients[..., first : first + s, :].tanh()
            shift = (weights * x[..., :s, :]).sum(dim=-2, keepdim=True)
            rows.append(means[..., s : s + 1, :] + shift)
            first += s
        return means if len(rows) == 1 else torch.cat(rows, dim=-2)

    def _scaled(self, levels: Tensor, like: Tensor) -> Tensor:
        """Levels "... s" as numbers from -1 to 1, "... s 1"."""
        return (levels.to(like.dtype) * (2 / (self.levels - 1)) - 1).unsqueeze(-1)

    def _around(self, parameters: Tensor, prediction: Tensor) -> Tensor:
        logits, (means, log_scales, coefficients) = self._without_logits(parameters)
        y = prediction.to(means.dtype).unsqueeze(-1)
        means = y + self._shifted(self.residual_unit * means, coefficients, -y.expand_as(means))
        parts = rearrange(
            torch.cat([means, log_scales, coefficients], dim=-2), "... j k -> ... (j k)"
        )
        return torch.cat([logits, parts], dim=-1)

    def _bounded(self, parameters: Tensor) -> tuple[Tensor, ...]:
        *logits, means, log_scales, coefficients = self._divide(parameters)
        means = means.clamp(-MAX_MEAN, MAX_MEAN)
        return *logits, means, log_scales.clamp(MIN_LOG_SCALE, MAX_LOG_SCALE), coefficients

    def _divide(self, parameters: Tensor) -> tuple[Tensor, ...]:
        """Logits "1 c" and "s v", means and log-scales "s k", coefficients "s(s-1)/2 k"."""
        all_logits, rest = self._without_logits(parameters)
        softmax_size = self.n_logits - self.n_components
        logits, softmax = all_logits.split([self.n_components, softmax_size], dim=-1)
        softmax = softmax.unflatten(-1, (self.values_per_step, -1))
        return (logits.unsqueeze(-2), softmax, *rest)

    def _without_logits(self, parameters: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """All logits, and the rest as `_divide` gives it."""
        # Each slice would have a gradient of its own as large as the parameters.
        sizes = [self.n_logits, parameters.shape[-1] - self.n_logits]
        logits, rest = parameters.split(sizes, dim=-1)
        parts = rearrange(rest, "... (j k) -> ... j k", k=self.n_mixtures)
        return logits, parts.split(self._parts, dim=-2)
