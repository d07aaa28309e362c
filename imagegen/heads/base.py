"""The contract that every output distribution keeps.

Axes: `b` batch, `e` model width, `p` parameters of the distribution, `s` values per step (a pixel's
channels, or one), `g` known values of the step, `u` uniform numbers per step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from imagegen.core.float64 import to_float64
from imagegen.heads.controls import Controls, nucleus


class OutputHead(nn.Module, ABC):
    """Maps the model's output to a distribution over the levels of a step's values.

    The values of a step are modelled one after another: the second given the first, and so on.

    All tensors are on the device of the head, with one exception: the uniform numbers, which are
    float64, are on its `float64_device`, where levels are drawn.

    Args:
        d_model: width `e` of the model's output.
        levels: number of levels of a value.
        values_per_step: number of values `s`.

    Attributes:
        projection: from the model's output to the parameters.
        takes_prediction: whether `forward` knows what to do with a prediction.
    """

    projection: nn.Linear
    takes_prediction = False

    def __init__(self, d_model: int, levels: int, values_per_step: int = 1) -> None:
        super().__init__()
        self.d_model = d_model
        self.levels = levels
        self.values_per_step = values_per_step

    @property
    @abstractmethod
    def uniforms_per_step(self) -> int:
        """How many uniform numbers `sample` consumes for one step, at least `values_per_step`."""

    def forward(
        self,
        hidden: Float[Tensor, "... e"],
        prediction: Float[Tensor, "... s"] | None = None,
    ) -> Float[Tensor, "... p"]:
        """Parameters of the distribution, in float32 at least.

        Args:
            hidden: the model's output.
            prediction: of the values, as numbers from -1 for level 0 to 1 for the last one; only
                where `takes_prediction`.
        """
        # In the weights' own precision under autocast too: bfloat16 has too few digits to place a
        # mean among 256 levels.
        with torch.autocast(hidden.device.type, enabled=False):
            parameters: Tensor = self.projection(hidden.to(self.projection.weight.dtype))
        parameters = parameters.to(torch.promote_types(parameters.dtype, torch.float32))
        return parameters if prediction is None else self._around(parameters, prediction)

    def start_from_prediction(self) -> None:
        """Set the initial weights for a model that gives predictions."""
        raise NotImplementedError(f"{type(self).__name__} takes no prediction")

    def _around(self, parameters: Tensor, prediction: Tensor) -> Tensor:
        """The parameters of the distribution around a prediction."""
        raise NotImplementedError(f"{type(self).__name__} takes no prediction")

    @abstractmethod
    def log_prob(
        self, parameters: Float[Tensor, "*batch p"], values: Integer[Tensor, "*batch s"]
    ) -> Float[Tensor, "*batch s"]:
        """Natural logarithm of the probability of each value given those before it in its step.

        Args:
            parameters: as `forward` gives them.
            values: levels, 0 to levels - 1.
        """

    @abstractmethod
    def log_probabilities(
        self,
        parameters: Float[Tensor, "*batch p"],
        given: Integer[Tensor, "*batch g"] | None = None,
    ) -> Float[Tensor, "*batch levels"]:
        """Natural logarithm of the probability of every level of the value that follows `given`.

        Args:
            parameters: as `forward` gives them.
            given: the first g values of the step, 0 <= g < s; none by default.
        """

    @abstractmethod
    def _draw(
        self,
        parameters: Float[Tensor, "b p"],
        uniforms: Float[Tensor, "b u"],
        controls: Controls,
    ) -> Integer[Tensor, "b s"]:
        """`sample` where something is left to chance; all in float64, on one device."""

    def check(self, controls: Controls) -> None:
        """Refuse controls that this distribution does not have.

        Raises:
            UserError: for those.
        """

    def sample(
        self,
        parameters: Float[Tensor, "b p"],
        uniforms: Float[Tensor, "b u"],
        controls: Controls = Controls(),  # noqa: B008 - frozen
    ) -> Integer[Tensor, "b s"]:
        """Draw the values of a step for each row, by inversion, from what `log_prob` scores.

        Args:
            parameters: as `forward` gives them.
            uniforms: independent numbers in the open interval (0, 1), float64, on the
                `float64_device` of the parameters' device.
            controls: see `Controls`; its guidance does not matter here.

        Returns:
            int64 levels, 0 to levels - 1, on the parameters' device.
        """
        if controls.greedy:
            return self._in_turn(
                parameters, lambda given: self.log_probabilities(parameters, given).argmax(dim=-1)
            )
        return self._draw(to_float64(parameters), uniforms, controls).to(parameters.device)

    def draw_levels(
        self,
        parameters: Float[Tensor, "rows p"],
        uniforms: Float[Tensor, "b u"],
        controls: Controls,
    ) -> Integer[Tensor, "b s"]:
        """`sample` or, where the controls have guidance, `sample_guided`.

        Args:
            parameters: with guidance, twice as many rows: all with the condition, all without.
            uniforms, controls: as in `sample`.
        """
        if controls.guidance == 1:
            return self.sample(parameters, uniforms, controls)
        with_it, without = parameters.chunk(2)
        return self.sample_guided(with_it, without, uniforms, controls)

    def sample_guided(
        self,
        parameters: Float[Tensor, "b p"],
        unconditional: Float[Tensor, "b p"],
        uniforms: Float[Tensor, "b u"],
        controls: Controls,
    ) -> Integer[Tensor, "b s"]:
        """Draw by classifier-free guidance (Ho and Salimans, 2022), over the levels themselves.

        Each value has log p = log p_u + guidance (log p_c - log p_u), normalised over the levels;
        temperature and top_p then act on these probabilities.

        Args:
            parameters, unconditional: with and without the condition.
            uniforms: as in `sample`.
            controls: without temperatures of a mixture.

        Returns:
            as `sample`.
        """
        conditional, unconditional = to_float64(parameters), to_float64(unconditional)

        def draw(given: Tensor) -> Tensor:
            with_it = self.log_probabilities(conditional, given)
            without = self.log_probabilities(unconditional, given)
            scores = without + controls.guidance * (with_it - without)
            if controls.temperature == 0:
                return scores.argmax(dim=-1)
            scores = nucleus(scores / controls.temperature, controls.top_p)
            return invert_cumulative(scores, uniforms[:, given.shape[-1]])

        return self._in_turn(conditional, draw).to(parameters.device)

    def _in_turn(self, parameters: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Draw the values of a step one after another, each given those before it."""
        given = parameters.new_zeros(len(parameters), 0, dtype=torch.int64)
        for _ in range(self.values_per_step):
            given = torch.cat([given, draw(given).unsqueeze(-1)], dim=-1)
        return given


def invert_cumulative(
    logits: Float[Tensor, "b k"], uniform: Float[Tensor, " b"]
) -> Integer[Tensor, " b"]:
    """Draw an index from softmax(logits) by inverting its cumulative sum."""
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    # Scaled by the total, which rounding may leave a little off 1: no index is out of range.
    threshold = uniform.unsqueeze(-1) * cumulative[:, -1:]
    return (cumulative <= threshold).sum(dim=-1).clamp(max=logits.shape[-1] - 1)
