"""Discretized mixture of logistics (PixelCNN++, Salimans et al., 2017, section 2), and of tables.

Levels 0 to L - 1 are at x = -1 to 1; level x has the mass that a logistic puts on the bin
(x - 1 / (L - 1), x + 1 / (L - 1)), and the two bins at the ends are open tails. A table is a
learned distribution over the levels, the same for all pixels of all images: it can say that 253 is
frequent and 251 is not, which no logistic can.

Axes beside those of `base`: `k` logistic, `t` table, `c` component of either kind, `v` level.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float, Float64, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.core.errors import UserError
from imagegen.core.float64 import to_float64
from imagegen.heads.base import OutputHead, invert_cumulative
from imagegen.heads.controls import Controls, nucleus, tempered

MIN_LOG_SCALE = -7.0
MAX_LOG_SCALE = 7.0
MAX_MEAN = 1e4
# Unit of the means around a prediction, in halves of a level, or 1 where that is less. They have to
# be right to a narrow component's width, which levels limit, and an optimizer like Adam moves all
# outputs of the projection about as far in a step.
RESIDUAL_UNIT = 51
TABLE_UNIT = 10.0
"""Of the tables' parameters, in nats: an optimizer like Adam moves them that much faster."""
PEAK_FLOOR = 0.02
"""What a table begins with beside its peak, all levels alike."""


class MixtureOfLogistics(OutputHead):
    """A mixture of `n_mixtures` logistics, or of products of one per channel, and of `n_tables`.

    All values of a step come from one component of the mixture (section 2.2): a logistic's mean of
    a value is linear in the values before it, mean_s + sum over r < s of tanh(c_sr) x_r, x in
    [-1, 1]. The parameters are the k + t logits of all components, s k means, s k log-scales and
    s (s - 1) / 2 k coefficients c. A table has a distribution for each value of a step, softmax
    over the levels of ten times `tables`, whatever the other values are.

    Log-scales are clamped to -7 (the bound of Katharopoulos et al., 2020) to 7, means to +-10,000:
    a bin then has a mass that float32 can hold, and the sampler uses the same bounds.

    With a prediction y of the values, the means and the values before are counted from it, as the
    residuals of a predictive coder: the mean of a value is y_s + unit mean_s + sum over r < s of
    tanh(c_sr) (x_r - y_r). `forward` puts that into the means, so that all else is as without.

    Args:
        n_mixtures: logistics, at least 1.
        n_tables: tables, 0 or more.

    Attributes:
        residual_unit: the unit, 0.2 for 256 levels and 1 for 52 or fewer.
        tables: "t s levels", or None without tables.

    Raises:
        UserError: for fewer than one logistic or a negative number of tables.
    """

    takes_prediction = True

    def __init__(
        self,
        d_model: int,
        levels: int,
        values_per_step: int = 1,
        n_mixtures: int = 10,
        n_tables: int = 0,
    ) -> None:
        super().__init__(d_model, levels, values_per_step)
        if n_mixtures < 1:
            raise UserError(f"head.n_mixtures={n_mixtures} must be at least 1.")
        if n_tables < 0:
            raise UserError(f"head.n_tables={n_tables} must be at least 0.")
        self.n_mixtures, self.n_tables = n_mixtures, n_tables
        self.residual_unit = min(1.0, RESIDUAL_UNIT / max(1, levels - 1))
        n_coefficients = values_per_step * (values_per_step - 1) // 2
        self._parts = (values_per_step, values_per_step, n_coefficients)
        self.projection = nn.Linear(d_model, (1 + sum(self._parts)) * n_mixtures + n_tables)
        self.tables = nn.Parameter(self._peaks() / TABLE_UNIT) if n_tables else None
        with torch.no_grad():
            logits, means, log_scales, coefficients = self._divide(self.projection.bias)
            self._share(logits)
            means.copy_((torch.arange(n_mixtures) + 0.5) / n_mixtures * 2 - 1)
            log_scales.fill_(-math.log(n_mixtures))
            coefficients.zero_()

    def start_from_prediction(self) -> None:
        """Components of several widths at the prediction; a channel errs as the one before it."""
        with torch.no_grad():
            # The choice between tables is as quick to learn as without a prediction.
            self.projection.weight[: self.n_mixtures].mul_(0.1)
            self.projection.weight[self.n_mixtures + self.n_tables :].mul_(0.1)
            logits, means, log_scales, coefficients = self._divide(self.projection.bias)
            self._share(logits)
            # Equal components would stay equal.
            means.normal_(std=0.02 / self.residual_unit)
            log_scales.copy_(torch.linspace(-1.5, -4.0, self.n_mixtures).expand_as(log_scales))
            coefficients.zero_()
            for s in range(1, self.values_per_step):
                coefficients[s * (s + 1) // 2 - 1] = math.atanh(0.8)

    def _share(self, logits: Tensor) -> None:
        """Begin with as much probability for all tables together as for all logistics."""
        logits[..., : self.n_mixtures] = 0
        logits[..., self.n_mixtures :] = math.log(self.n_mixtures / max(1, self.n_tables))

    def _peaks(self) -> Float[Tensor, "t s levels"]:
        """Log-probabilities that the tables begin with: a peak each, all over the levels."""
        places = torch.linspace(0, 1, self.levels)
        centres = torch.linspace(0, 1, self.n_tables).unsqueeze(-1)
        peaks = (-(places - centres).abs() * self.n_tables).softmax(dim=-1)
        mixed = (1 - PEAK_FLOOR) * peaks + PEAK_FLOOR / self.levels
        return mixed.log().unsqueeze(1).repeat(1, self.values_per_step, 1)

    @property
    def uniforms_per_step(self) -> int:
        return 1 + self.values_per_step

    def constants(self) -> dict[str, Tensor]:
        return {"tables": self._log_tables(self.projection.weight)} if self.n_tables else {}

    def log_prob(
        self, parameters: Float[Tensor, "*batch p"], values: Integer[Tensor, "*batch s"]
    ) -> Float[Tensor, "*batch s"]:
        logits, means, log_scales, coefficients = self._bounded(parameters)
        means = self._shifted(means, coefficients, self._scaled(values, means))
        log_mass = self._log_mass(means, log_scales, values.unsqueeze(-1))
        log_mass = self._with_tables(log_mass, values)
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
        logits, means, log_scales, coefficients = self._bounded(parameters)
        logits = logits.squeeze(-2)
        known = 0 if given is None else given.shape[-1]
        if given is not None and known:
            x = F.pad(self._scaled(given, means), (0, 0, 0, self.values_per_step - known))
            means = self._shifted(means, coefficients, x)
            seen = (..., slice(0, known), slice(None))
            log_mass = self._log_mass(means[seen], log_scales[seen], given.unsqueeze(-1))
            log_mass = self._with_tables(log_mass, given)
            logits = logits + log_mass.sum(dim=-2)
        levels = torch.arange(self.levels, device=parameters.device).unsqueeze(-1)
        following = (..., slice(known, known + 1), slice(None))
        log_mass = self._log_mass(means[following], log_scales[following], levels)
        weights = logits.log_softmax(dim=-1)
        of_logistics, of_tables = weights.tensor_split([self.n_mixtures], dim=-1)
        found = (of_logistics.unsqueeze(-2) + log_mass).logsumexp(dim=-1)
        if self.tables is None:
            return found
        # A product of matrices instead of a sum over components for each level.
        tables = of_tables.exp() @ self._log_tables(log_mass)[:, known].exp()
        return torch.logaddexp(found, tables.log())

    def _draw(
        self,
        parameters: Float[Tensor, "b p"],
        uniforms: Float[Tensor, "b u"],
        controls: Controls,
    ) -> Integer[Tensor, "b s"]:
        logits, means, log_scales, coefficients = self._bounded(parameters)
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
        if not self.n_tables:
            return levels
        table = (component - self.n_mixtures).clamp(min=0)
        cumulative = _cumulative(self._log_tables(parameters)[table], controls)
        drawn = (cumulative <= uniforms[:, 1:, None]).sum(dim=-1)
        return torch.where((component < self.n_mixtures).unsqueeze(-1), levels, drawn)

    def cumulative_tables(self, controls: Controls) -> Float64[Tensor, "t s levels"]:
        """Cumulative probabilities of the tables' levels, as they are drawn from.

        Args:
            controls: those for the width of a component act on the tables' levels.
        """
        return _cumulative(self._log_tables(to_float64(self.projection.bias)), controls)

    def _log_tables(self, like: Tensor) -> Float[Tensor, "t s levels"]:
        """Log-probabilities of the levels of each table, in the precision and place of `like`."""
        if self.tables is None:
            return like.new_zeros(0, self.values_per_step, self.levels)
        return (TABLE_UNIT * self.tables.to(like.device).to(like.dtype)).log_softmax(dim=-1)

    def _with_tables(self, log_mass: Tensor, levels: Tensor) -> Tensor:
        """Log-probabilities "... s c" of levels "... s", of those "... s k" under the logistics."""
        if self.tables is None:
            return log_mass
        tables = self._log_tables(log_mass)
        columns = [
            F.embedding(levels[..., s].long(), tables[:, s].mT) for s in range(levels.shape[-1])
        ]
        return torch.cat([log_mass, torch.stack(columns, dim=-2)], dim=-1)

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
        logits, means, log_scales, coefficients = self._divide(parameters)
        y = prediction.to(means.dtype).unsqueeze(-1)
        means = y + self._shifted(self.residual_unit * means, coefficients, -y.expand_as(means))
        parts = rearrange(
            torch.cat([means, log_scales, coefficients], dim=-2), "... j k -> ... (j k)"
        )
        return torch.cat([logits.squeeze(-2), parts], dim=-1)

    def _bounded(self, parameters: Tensor) -> tuple[Tensor, ...]:
        logits, means, log_scales, coefficients = self._divide(parameters)
        means = means.clamp(-MAX_MEAN, MAX_MEAN)
        return logits, means, log_scales.clamp(MIN_LOG_SCALE, MAX_LOG_SCALE), coefficients

    def _divide(self, parameters: Tensor) -> tuple[Tensor, ...]:
        """Logits "1 c", means and log-scales "s k", coefficients "s(s-1)/2 k"."""
        logits, rest = parameters.tensor_split([self.n_mixtures + self.n_tables], dim=-1)
        parts = rearrange(rest, "... (j k) -> ... j k", k=self.n_mixtures)
        return (logits.unsqueeze(-2), *parts.split(self._parts, dim=-2))


def _cumulative(logits: Float[Tensor, "b s levels"], controls: Controls) -> Tensor:
    rows = tempered(logits.flatten(0, 1), controls.for_scale)
    rows = nucleus(rows, controls.top_p).softmax(dim=-1).cumsum(dim=-1)
    # Scaled by the total, which rounding may leave a little off 1.
    return (rows / rows[:, -1:]).view_as(logits)
