"""What `imagegen verify` measures of a model, one function a check.

Of a model of any order, the two forms, what is seen and the state are checked with every other
pixel visible.

A model is checked on its own device, whose sequences and parameters are there too. What a check
computes in float64 is on its `float64_device`: on the CPU for a device without float64.

Axes: `n` image, `h w c` height, width, channel, `i` position, `s` values per step, `p` parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from imagegen.attention.linear import LinearAttention
from imagegen.core.errors import UserError, first_line
from imagegen.core.float64 import float64_device, to_float64
from imagegen.core.inference import inference
from imagegen.generation.random_numbers import uniforms
from imagegen.generation.sampling_loop import generate
from imagegen.generation.sampling_request import ROW_GROUP
from imagegen.model.transformer import ImageTransformer, ModelState

WEIGHTS = "weights are finite"
FORMS_64 = "parallel form = steps, float64"
FORMS_32 = "parallel form = steps, as used"
SUM = "probabilities sum to one"
SAMPLER = "sampler draws the probabilities"
CAUSALITY = "no value sees a later one"
NORMALIZER = "normalisers stay above zero"
BATCH = "images do not depend on company"
STATE = "state keeps its size"

DRAWS = 20_000
BINS = 32
POSITIONS = 12


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        name: what should hold.
        figure: what was measured, in words and numbers.
        tolerance: what is still sound.
        ok: whether it is; None where the check has no meaning for the model.
    """

    name: str
    figure: str
    tolerance: str
    ok: bool | None

    def to_dict(self) -> dict[str, Any]:
        """Plain strings and booleans."""
        return asdict(self)


def all_checks(
    model: ImageTransformer, images: UInt8[np.ndarray, "n h w c"], seed: int
) -> Iterator[Check]:
    """Run every check, one after the other.

    Args:
        model: in evaluation mode; stays as it was.
        images: levels, at least one image.
        seed: of the random numbers that some checks draw.
    """
    given = torch.from_numpy(np.array(images)).to(model.device)
    sequence = model.raster.to_sequence(given)
    visible = _every_other(model, len(given))
    order = model.raster.to_sequence(given, visible)
    checks: dict[str, Callable[[], Check]] = {
        WEIGHTS: lambda: weights_are_finite(model),
        FORMS_64: lambda: forms_agree_exactly(model, order, visible),
        FORMS_32: lambda: forms_agree_in_use(model, order, visible),
        SUM: lambda: probabilities_sum_to_one(model, sequence),
        SAMPLER: lambda: sampler_draws_the_distribution(model, sequence, seed),
        CAUSALITY: lambda: nothing_later_is_seen(model, order, visible),
        NORMALIZER: lambda: normalizers_stay_away_from_zero(model, sequence),
        BATCH: lambda: images_do_not_depend_on_company(model, seed),
        STATE: lambda: state_keeps_its_size(model, order, visible),
    }
    for name, check in checks.items():
        try:
            with inference(model):
                found = check()
        except (RuntimeError, ValueError, IndexError, UserError) as error:
            # A broken model may fail anywhere; the other checks say more about it.
            found = Check(name, f"failed: {first_line(error)}", "to run", False)
        yield found


def _every_other(model: ImageTransformer, count: int) -> Bool[Tensor, "b h w"] | None:
    """Half of the pixels, as visible ones of a model of any order."""
    if model.order != "any":
        return None
    height, width = model.spec.height, model.spec.width
    pixel = torch.arange(height * width, device=model.device).view(1, height, width)
    return (pixel % 2 == 1).expand(count, -1, -1)


def weights_are_finite(model: ImageTransformer) -> Check:
    """Count weights, and fixed numbers beside them, that are NaN or infinite."""
    tensors = model.state_dict().values()
    bad = sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors)
    total = sum(tensor.numel() for tensor in tensors)
    return Check(WEIGHTS, f"{bad} of {total:,} are not", "0", bad == 0)


def forms_agree_exactly(
    model: ImageTransformer, sequence: Tensor, visible: Tensor | None = None
) -> Check:
    """The largest difference of a log2-probability between the two forms, over all positions.

    In float64, where rounding is far below what any mistake in a formula makes; by a copy of the
    model on the CPU where its device has no float64, as the figure then says.
    """
    tolerance = 1e-6
    device = float64_device(model.device)
    exact = copy.deepcopy(model).to(device).double()
    region = None if visible is None else visible.to(device)
    parallel, steps = _log2_probs(exact, sequence.to(device), region)
    error = float((parallel - steps).abs().max())
    where = "" if device == model.device else f", on the {device.type.upper()}"
    return Check(
        FORMS_64, f"{error:.1e} bits per value{where}", f"{tolerance:g}", error <= tolerance
    )


def forms_agree_in_use(
    model: ImageTransformer, sequence: Tensor, visible: Tensor | None = None
) -> Check:
    """The largest difference of an image's bits/dim between the two forms, in the model's dtype."""
    tolerance = 1e-3
    parallel, steps = _log2_probs(model, sequence, visible)
    error = float((parallel.flatten(1).mean(1) - steps.flatten(1).mean(1)).abs().max())
    return Check(FORMS_32, f"{error:.1e} bits/dim", f"{tolerance:g}", error <= tolerance)


def probabilities_sum_to_one(model: ImageTransformer, sequence: Tensor) -> Check:
    """The largest distance from 1 of the sum over all levels, at positions spread over an image."""
    tolerance = 1e-4
    chosen = _spread(sequence.shape[1], 256)
    parameters, values = model.parameters_of(sequence[:1])[0, chosen], sequence[0, chosen]
    error = 0.0
    for known in range(sequence.shape[2]):
        logs = model.head.log_probabilities(parameters, values[:, :known])
        error = max(error, float((to_float64(logs).exp().sum(dim=-1) - 1).abs().max()))
    return Check(SUM, f"off by {error:.1e}", f"{tolerance:g}", error <= tolerance)


def sampler_draws_the_distribution(model: ImageTransformer, sequence: Tensor, seed: int) -> Check:
    """The least p-value of chi-squared tests of drawn levels, at some positions of an image.

    Of several values per step, each is tested given those drawn before it: the probability
    of all levels below it, and of a random part of its own, is uniform.
    """
    tolerance = 1e-6
    count = model.head.uniforms_per_step
    chosen = _spread(sequence.shape[1], POSITIONS)
    parameters = model.parameters_of(sequence[:1])[0, chosen]
    least = 1.0
    for stream, row in enumerate(parameters):
        exact = to_float64(row)
        noise = torch.from_numpy(uniforms(seed, 0, stream, DRAWS * (count + 1))).to(exact.device)
        noise = noise.view(DRAWS, count + 1)
        drawn = model.head.sample(row.expand(DRAWS, -1), noise[:, :count]).to(exact.device)
        counts = torch.bincount(drawn[:, 0].cpu(), minlength=model.spec.levels).double()
        expected = DRAWS * model.head.log_probabilities(exact).exp().cpu()
        least = min(least, p_value(counts, expected))
        for known in range(1, drawn.shape[1]):
            part = slice(0, DRAWS // 20)
            given, level = drawn[part, :known], drawn[part, known : known + 1]
            rows = exact.expand(len(level), -1)
            masses = model.head.log_probabilities(rows, given).exp()
            own = masses.gather(1, level)
            place = masses.cumsum(dim=1).gather(1, level) - own * noise[part, count:]
            places = (place * BINS).long().clamp(0, BINS - 1).flatten().cpu()
            counts = torch.bincount(places, minlength=BINS).double()
            least = min(least, p_value(counts, torch.full_like(counts, len(level) / BINS)))
    figure = f"least p = {least:.1e} at {len(chosen)} positions, {DRAWS:,} draws each"
    return Check(SAMPLER, figure, f"{tolerance:g}", least >= tolerance)


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Pearson's chi-squared test of counts; levels that are expected less than 5 times are joined.

    Returns:
        the probability of counts at least as far from what is expected; 1 where all levels join.
    """
    if not torch.isfinite(expected).all():
        return 0.0
    rare = expected < 5
    counts, expected = (
        torch.cat([numbers[~rare], numbers[rare].sum().view(1)]) for numbers in (counts, expected)
    )
    # What is left over may still be rare; it then joins the rarest of the others.
    if len(expected) > 1 and expected[-1] < 5:
        rarest = int(expected[:-1].argmin())
        for numbers in (counts, expected):
            numbers[rarest] += numbers[-1]
        counts, expected = counts[:-1], expected[:-1]
    freedom = len(expected) - 1
    if freedom < 1:
        return 1.0
    statistic = ((counts - expected).square() / expected).sum()
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))


def nothing_later_is_seen(
    model: ImageTransformer, sequence: Tensor, visible: Tensor | None = None
) -> Check:
    """Count positions whose change reaches the distribution of a step up to them, bit for bit."""
    length = sequence.shape[1]
    leaks, tested = 0, _spread(length, POSITIONS)
    first = None if visible is None else visible[:1]
    expected = model.parameters_of(sequence[:1], visible=first)
    for position in tested:
        changed = sequence[:1].int()
        changed[:, position:] = (changed[:, position:] + 1 + position) % model.spec.levels
        until = slice(0, position + 1)
        # NaNs are counted where weights are.
        before, after = (
            torch.nan_to_num(parameters[:, until])
            for parameters in (expected, model.parameters_of(changed.byte(), visible=first))
        )
        leaks += not torch.equal(before, after)
    return Check(CAUSALITY, f"{leaks} of {len(tested)} positions leak", "0", leaks == 0)


def normalizers_stay_away_from_zero(model: ImageTransformer, sequence: Tensor) -> Check:
    """Count normalisers of linear attention near `eps`, which pulls the output there to zero.

    A trained model may have a few of them, at positions that it has nothing to ask about.
    """
    share = 1e-3
    layers = [module for module in model.modules() if isinstance(module, LinearAttention)]
    if not layers:
        return Check(NORMALIZER, "no linear attention", "none", None)
    seen: list[list[Tensor]] = [[] for _ in layers]
    known = [layer.normalizer_observer for layer in layers]
    try:
        for layer, normalizers in zip(layers, seen, strict=True):
            layer.normalizer_observer = normalizers.append
        model.parameters_of(sequence)
    finally:
        for layer, observer in zip(layers, known, strict=True):
            layer.normalizer_observer = observer
    values = [torch.cat([each.flatten() for each in normalizers]) for normalizers in seen]
    every = torch.cat(values)
    least, finite = float(every.min()), bool(every.isfinite().all())
    # A feature map that may be negative is clamped on purpose.
    bounded = [
        (normalizers, 10 * layer.eps)
        for layer, normalizers in zip(layers, values, strict=True)
        if layer.feature_map.floor is None
    ]
    if not bounded:
        return Check(NORMALIZER, f"least {least:.1e}", "clamped", finite)
    total = sum(normalizers.numel() for normalizers, _ in bounded)
    near = sum(int((normalizers < bound).sum()) for normalizers, bound in bounded)
    highest = max(bound for _, bound in bounded)
    figure = f"least {least:.1e}, {near} of {total:,} under {highest:g}"
    return Check(NORMALIZER, figure, f"{share:.1%}", finite and near <= share * total)


def images_do_not_depend_on_company(model: ImageTransformer, seed: int) -> Check:
    """Count values of an image that differ with the number of images drawn beside it.

    On the CPU there may be none. On other devices, libraries choose their algorithms by the number
    of rows, and round accordingly; a level that falls otherwise changes all that follow it, so the
    count says how often that happens and no more. What has to hold there is that an image is as
    probable in any company: its bits/dim, step by step, may differ by what rounding makes.
    """
    few = next(generate(model, 3, seed=seed, batch_size=3))
    many = next(generate(model, ROW_GROUP + 1, seed=seed, batch_size=ROW_GROUP + 1))
    alone = next(generate(model, 1, seed=seed, start=1, batch_size=1))[0]
    differing = sum(int((alone != other[1]).sum()) for other in (few, many))
    figure = f"{differing} of {2 * alone.size:,} values differ"
    if model.device.type == "cpu":
        return Check(BATCH, figure, "0", differing == 0)
    tolerance = 1e-3
    few[1] = many[1] = alone
    # As many rows as were drawn.
    one, other = (
        _stepped_bits(model, np.resize(batch, (rows, *alone.shape)), 1)
        for batch, rows in ((few, ROW_GROUP), (many, 2 * ROW_GROUP))
    )
    error = abs(one - other)
    figure = f"{figure}, {error:.1e} bits/dim"
    return Check(BATCH, figure, f"{tolerance:g}", error <= tolerance)


def _stepped_bits(model: ImageTransformer, images: UInt8[np.ndarray, "n h w c"], row: int) -> float:
    """bits/dim of one of the images, by steps of all of them."""
    sequence = model.raster.to_sequence(torch.from_numpy(images).to(model.device))
    logs = [
        model.head.log_prob(parameters[row], sequence[row, position])
        for position, (parameters, _) in enumerate(_stepped(model, sequence))
    ]
    return -float(to_float64(torch.stack(logs)).mean()) / math.log(2)


def state_keeps_its_size(
    model: ImageTransformer, sequence: Tensor, visible: Tensor | None = None
) -> Check:
    """Bytes of one image's state at the first and the last position."""
    first = last = 0
    for _, state in _stepped(model, sequence[:1], None if visible is None else visible[:1]):
        last = state.nbytes
        first = first or last
    figure = f"{first:,} bytes at the first, {last:,} at the last position"
    if not model.constant_state:
        return Check(STATE, figure, "may grow", None)
    return Check(STATE, figure, "the same", first == last)


def _log2_probs(
    model: ImageTransformer, sequence: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """log2-probabilities of all values, "n i s", by the parallel form and step by step."""
    parallel = model.head.log_prob(model.parameters_of(sequence, visible=visible), sequence)
    steps = [
        model.head.log_prob(parameters, sequence[:, position])
        for position, (parameters, _) in enumerate(_stepped(model, sequence, visible))
    ]
    stacked = torch.stack(steps, dim=1)
    return to_float64(parallel) / math.log(2), to_float64(stacked) / math.log(2)


def _stepped(
    model: ImageTransformer, sequence: Tensor, visible: Tensor | None = None
) -> Iterator[tuple[Tensor, ModelState]]:
    """Parameters and state of every step, the values given."""
    state = model.initial_state(len(sequence), visible=visible)
    for position in range(sequence.shape[1]):
        before = sequence[:, position - 1] if position else None
        parameters, state = model.step(before, state)
        yield parameters, state


def _spread(length: int, count: int) -> list[int]:
    """At most `count` different positions from the first to the last."""
    return sorted({round(x) for x in np.linspace(0, length - 1, min(count, length))})
