"""A free probability for each level (PixelRNN, van den Oord et al., 2016, section 3.5)."""

from __future__ import annotations

from jaxtyping import Float, Integer
from torch import Tensor, nn

from imagegen.core.errors import UserError
from imagegen.heads.base import OutputHead, invert_cumulative
from imagegen.heads.controls import Controls, nucleus, tempered


class Categorical(OutputHead):
    """Softmax over the levels of one value; the `p` parameters are the logits, one a level.

    Raises:
        UserError: for several values per step, which it could only take for independent.
    """

    def __init__(self, d_model: int, levels: int, values_per_step: int = 1) -> None:
        super().__init__(d_model, levels, values_per_step)
        if values_per_step > 1:
            raise UserError(
                "head=categorical models one value per step; take model.tokens=subpixel with it, "
                "or head=mixture_of_logistics."
            )
        self.projection = nn.Linear(d_model, levels)

    @property
    def uniforms_per_step(self) -> int:
        return 1

    def log_prob(
        self, parameters: Float[Tensor, "*batch p"], values: Integer[Tensor, "*batch s"]
    ) -> Float[Tensor, "*batch s"]:
        return self.log_probabilities(parameters).gather(-1, values.long())

    def log_probabilities(
        self,
        parameters: Float[Tensor, "*batch p"],
        given: Integer[Tensor, "*batch g"] | None = None,
    ) -> Float[Tensor, "*batch levels"]:
        return parameters.log_softmax(dim=-1)

    def check(self, controls: Controls) -> None:
        for name in ("mixture_temperature", "scale_temperature"):
            if getattr(controls, name) is not None:
                raise UserError(
                    f"{name} belongs to mixtures, but this model has head=categorical; use "
                    "temperature."
                )

    def _draw(
        self,
        parameters: Float[Tensor, "b p"],
        uniforms: Float[Tensor, "b u"],
        controls: Controls,
    ) -> Integer[Tensor, "b s"]:
        logits = nucleus(tempered(parameters, controls.temperature), controls.top_p)
        return invert_cumulative(logits, uniforms[:, 0]).unsqueeze(-1)
