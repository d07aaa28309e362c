"""Completing any region with a model that knows the raster order alone: sequential Monte Carlo.

Many particles go through the image side by side. Pixels that are missing are drawn for each of them
from the model; the pixels that are kept multiply a particle's weight by their probability given
what it has drawn so far; where the weights have become too unequal, particles are drawn anew from
among them by systematic resampling (Doucet and Johansen, 2009, algorithm 4 and section 3.4), which
forks the states of the model. At the end, weighted particles follow p(missing | kept), the more of
them the more exactly, and

    p(kept) ~ the product, over the resamplings, of the mean weight,

whose expectation is exact with any number of particles.

Temperature, top_p and guidance change how missing pixels are drawn. The kept ones weigh as the
model has learned them, given the label: pixels that a cooler model would never draw can be kept.

Axes: `b` particle, `n` step, `s` values per step, `p` parameters, `u` uniform numbers, `h w c`
height, width, channel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, UInt8
from torch import Tensor

from imagegen.core.errors import UserError
from imagegen.core.float64 import float64_device
from imagegen.generation.decode import Particles
from imagegen.generation.random_numbers import noise, uniforms
from imagegen.generation.sampling_request import (
    SamplingRequest,
    initial_state,
    no_gradients,
)
from imagegen.generation.watching import Growth
from imagegen.model.state import ModelState
from imagegen.model.transformer import ImageTransformer

PARTICLES = 256
RESAMPLED = 1 / 2
"""Share of the particles; where fewer are effective, they are drawn anew."""
FEWEST = 1 / 32
"""Share of the particles below which too few have decided about an image; one is too few, too."""
_STREAM = 2**64 - 1  # of the random numbers that choose between particles


@dataclass(frozen=True)
class Report:
    """What became of the particles of an image.

    Attributes:
        particles: how many there were.
        least_effective: the least effective number of them, 1 / sum of the squared shares of the
            weights, where kept pixels had weighed them.
        resamplings: how often they were drawn anew.
        distinct: how many different images they hold at the end.
        log_evidence: estimate of the natural logarithm of the probability of the kept values, given
            those that come before all missing ones; its exponential is unbiased.
    """

    particles: int
    least_effective: float
    resamplings: int
    distinct: int
    log_evidence: float

    @property
    def left(self) -> int:
        """The number of particles that decided, where it was least."""
        return max(1, min(self.distinct, round(self.least_effective)))

    @property
    def collapsed(self) -> bool:
        """Whether these are too few."""
        return self.particles > 1 and self.left < max(2, self.particles * FEWEST)


class SteppedParticles(Particles):
    """Particles that go through PyTorch's own steps, on the model's device.

    Args:
        model: whose `state`, after the step of `parameters`, has a row for each particle; with
            guidance, as many again without labels.
        parameters: the distribution of the first step.
        sequence: see `Particles`.
        numbers: uniform numbers of the steps from the first one on.
        request: how to draw.
    """

    def __init__(
        self,
        model: ImageTransformer,
        state: ModelState,
        parameters: Float[Tensor, "rows p"],
        sequence: UInt8[np.ndarray, "b n s"],
        numbers: Float64[np.ndarray, "b m u"],
        request: SamplingRequest,
    ) -> None:
        self.model, self.state, self.parameters = model, state, parameters
        self.sequence, self.request = sequence, request
        self.first = state.position - 1
        self.numbers = torch.from_numpy(numbers).to(float64_device(model.device))

    def draw(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            self._go_to(step)
            numbers = self.numbers[:, step - self.first]
            levels = self.model.head.draw_levels(self.parameters, numbers, self.request.controls)
            self.sequence[:, step] = levels.cpu().numpy()

    def score(self, start: int, stop: int) -> Float64[np.ndarray, " b"]:
        scores = np.zeros(len(self.sequence))
        for step in range(start, stop):
            self._go_to(step)
            parameters = self.parameters[: len(self.sequence)]
            log_prob = self.model.head.log_prob(parameters, self._values(step))
            scores += log_prob.cpu().double().sum(dim=-1).numpy()
        return scores

    def select(self, rows: Int64[np.ndarray, " b"]) -> None:
        self.sequence[:] = self.sequence[rows]
        copies = [rows + len(rows) * copy for copy in range(self.request.copies)]
        index = torch.from_numpy(np.concatenate(copies)).to(self.model.device)
        self.state = self.state.select(index)

    def _go_to(self, step: int) -> None:
        """Find the distribution of a step, whose predecessor's was found last."""
        if step > self.first:
            values = self._values(step - 1).repeat(self.request.copies, 1)
            self.parameters, self.state = self.model.step(values, self.state)

    def _values(self, step: int) -> UInt8[Tensor, "b s"]:
        return torch.from_numpy(self.sequence[:, step].copy()).to(self.model.device)


def draw_particles(
    model: ImageTransformer,
    image: UInt8[np.ndarray, "h w c"],
    kept: Bool[np.ndarray, " n"],
    index: int,
    forks: Sequence[int],
    request: SamplingRequest,
    particles: int,
    orientation: int = 0,
) -> tuple[UInt8[np.ndarray, "k h w c"], Report]:
    """Completions `forks` of an image, each one of its particles.

    Args:
        image: in its orientation, as are the completions.
        kept: the steps whose values are kept; others of `image` do not matter.
        index: of the image, to which its random numbers belong.
        forks: the completions: each chooses by a number of its own, and the first few choices
            spread evenly over the weights, however many there are.
        particles: how many; a single one where nothing is left to chance.
        orientation: of the image.
    """
    count = 1 if request.controls.greedy else particles
    with no_gradients(model):
        cloud = _begin(model, image, kept, index, request, count, orientation)
        chance = uniforms(request.seed, index, _STREAM, len(kept) + 1)
        log_weights = np.zeros(count)

        def picked() -> UInt8[np.ndarray, "k n s"]:
            """As the particles are now: until the end, what comes may decide for others."""
            return cloud.sequence[_inverted(log_weights, (_van_der_corput(forks) + chance[0]) % 1)]

        which = [(index, fork) for fork in forks]
        told = (request.progress, request.watch, which, int(kept.argmin()), model.raster)
        growth = Growth(*told, picked, kept=kept)
        report = _go_through(model, cloud, kept, chance, log_weights, growth)
    return model.raster.to_images(torch.from_numpy(picked())).numpy(), report


def _begin(
    model: ImageTransformer,
    image: UInt8[np.ndarray, "h w c"],
    kept: Bool[np.ndarray, " n"],
    index: int,
    request: SamplingRequest,
    count: int,
    orientation: int,
) -> Particles:
    """Particles before the first missing step."""
    first = int(kept.argmin())
    given = model.raster.to_sequence(torch.from_numpy(np.array(image[None])))
    # Nothing may depend on what is missing.
    given = given.masked_fill(torch.from_numpy(~kept)[None, :, None], 0)
    state = initial_state(model, [index], 1, request, orientation=np.array([orientation]))
    if first:
        prefix = given[:, :first].to(model.device)
        parameters, state = model.prefill(prefix.repeat(request.copies, 1, 1), state)
    else:
        parameters, state = model.step(None, state)
    parameters, state = parameters.repeat_interleave(count, dim=0), state.repeat(count)
    sequence = given.repeat(count, 1, 1).numpy()
    streams = [(index, particle) for particle in range(count)]
    numbers = noise(model, request.seed, streams, first, count)
    cloud = None
    if request.decoder is not None:
        cloud = request.decoder.particles(state, parameters, sequence, numbers, request.controls)
    if cloud is None:
        cloud = SteppedParticles(model, state, parameters, sequence, numbers, request)
    return cloud


def _go_through(
    model: ImageTransformer,
    cloud: Particles,
    kept: Bool[np.ndarray, " n"],
    chance: Float64[np.ndarray, " m"],
    log_weights: Float64[np.ndarray, " b"],
    growth: Growth,
) -> Report:
    """Draw, weigh and resample.

    Args:
        log_weights: 0; in the end, the logarithms of the weights.
        growth: is told how far the particles are.
    """
    count, first = len(cloud.sequence), int(kept.argmin())
    evidence, least, resamplings = 0.0, float(count), 0
    for start, stop in _pieces(kept, first, model.raster.row_length):
        if not kept[start]:
            cloud.draw(start, stop)
        else:
            log_weights += cloud.score(start, stop)
            # Between two kept steps nothing is drawn, so that nothing is gained by resampling.
            if stop == len(kept) or not kept[stop]:
                effective = _effective(log_weights)
                least = min(least, effective)
                if effective < count * RESAMPLED:
                    evidence += _log_mean(log_weights)
                    uniform = (np.arange(count) + chance[stop]) / count
                    cloud.select(_inverted(log_weights, uniform))
                    log_weights[:] = 0
                    resamplings += 1
        growth(slice(None), stop)
    evidence += _log_mean(log_weights)
    distinct = len(np.unique(cloud.sequence.reshape(count, -1), axis=0))
    return Report(count, least, resamplings, distinct, evidence)


def _pieces(kept: Bool[np.ndarray, " n"], first: int, longest: int) -> Iterator[tuple[int, int]]:
    """Runs of steps from the first one on that are all kept or all missing, in bounded pieces."""
    edges = np.flatnonzero(np.diff(kept)) + 1
    bounds = [first, *(int(edge) for edge in edges if edge > first), len(kept)]
    for start, stop in pairwise(bounds):
        for begin in range(start, stop, longest):
            yield begin, min(begin + longest, stop)


def _effective(log_weights: Float64[np.ndarray, " b"]) -> float:
    """The effective number of particles (Liu and Chen, 1995): 1 / sum of the squared weights."""
    shares = _shares(log_weights)
    return float(1 / (shares**2).sum())


def _shares(log_weights: Float64[np.ndarray, " b"]) -> Float64[np.ndarray, " b"]:
    if not np.isfinite(log_weights).all():
        raise UserError(
            "the model finds no probability for a pixel that is kept, so its training must have "
            "diverged; take another checkpoint."
        )
    weights = np.exp(log_weights - log_weights.max())
    shares: np.ndarray = weights / weights.sum()
    return shares


def _log_mean(log_weights: Float64[np.ndarray, " b"]) -> float:
    largest = float(log_weights.max())
    return largest + math.log(float(np.exp(log_weights - largest).mean()))


def _inverted(
    log_weights: Float64[np.ndarray, " b"], uniform: Float64[np.ndarray, " k"]
) -> Int64[np.ndarray, " k"]:
    """The particle that each number in [0, 1) falls on, when they share it by their weights."""
    cumulative = _shares(log_weights).cumsum()
    # Scaled by the total, which rounding may leave a little off 1.
    found = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    return np.minimum(found, len(log_weights) - 1)


def _van_der_corput(indices: Sequence[int]) -> Float64[np.ndarray, " k"]:
    """Elements of the sequence 0, 1/2, 1/4, 3/4, 1/8, … (binary digits mirrored at the point)."""
    return np.array([int(f"{index:064b}"[::-1], 2) / 2.0**64 for index in indices])
