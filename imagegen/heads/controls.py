"""What a user can change about drawing from a distribution, without changing the model.

Axes: `b` batch, `k` choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from imagegen.core.errors import UserError


@dataclass(frozen=True)
class Controls:
    """How to draw; the defaults draw from exactly what the model has learned.

    Attributes:
        temperature: 0 or more; lower is more certain, 0 takes the most probable level (the lowest
            of them on a tie).
        mixture_temperature: of the choice of a mixture's component, instead of `temperature`.
        scale_temperature: factor on the width of the chosen component, instead of `temperature`.
        top_p: above 0, at most 1: choose only among the most probable components (or levels) that
            together have at least this probability (Holtzman et al., 2020).
        guidance: 1 draws from the conditional distribution, more exaggerates what the label
            changes, 0 ignores it (classifier-free guidance, Ho and Salimans, 2022).

    Raises:
        UserError: for numbers out of their range, and temperatures of a mixture with guidance,
            which acts on the levels' probabilities.
    """

    temperature: float = 1.0
    mixture_temperature: float | None = None
    scale_temperature: float | None = None
    top_p: float = 1.0
    guidance: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "mixture_temperature", "scale_temperature", "guidance"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name}={value} must be a finite number of at least 0.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1.")
        for name in ("mixture_temperature", "scale_temperature"):
            if self.guidance != 1 and getattr(self, name) is not None:
                raise UserError(
                    f"{name} has no meaning with guidance={self.guidance}, which draws levels and "
                    "no components; take temperature."
                )

    @property
    def greedy(self) -> bool:
        """Whether the most probable level is taken."""
        own = self.mixture_temperature is not None or self.scale_temperature is not None
        return self.temperature == 0 and not own

    @property
    def for_mixture(self) -> float:
        """The temperature of the choice of a component."""
        given = self.mixture_temperature
        return self.temperature if given is None else given

    @property
    def for_scale(self) -> float:
        """The factor on the width of a component."""
        given = self.scale_temperature
        return self.temperature if given is None else given


def nucleus(logits: Float[Tensor, "b k"], top_p: float) -> Float[Tensor, "b k"]:
    """The logits, -inf for choices outside the smallest set of probability `top_p` or more."""
    if top_p == 1:
        return logits
    ordered, order = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    # A choice stays if those before it do not reach top_p without it.
    dropped = ordered.cumsum(dim=-1) - ordered >= top_p
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


def tempered(logits: Float[Tensor, "b k"], temperature: float) -> Float[Tensor, "b k"]:
    """The logits at a temperature; at 0 all but the first of the largest are -inf."""
    if temperature > 0:
        return logits / temperature
    best = logits.argmax(dim=-1, keepdim=True)
    return torch.full_like(logits, -torch.inf).scatter(-1, best, 0.0)
