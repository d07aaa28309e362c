"""Draw the values of a step from the output distribution, as `OutputHead.sample` does.

Axes: `r` row, `p` parameter, `u` uniform number, `s` value, `k` logistic, `c` component: a
logistic, a softmax or a level.
"""

from __future__ import annotations

import math
from typing import no_type_check

import numpy as np

from imagegen.core.compiled.compile import compiled
from imagegen.heads.mixture_of_logistics import MAX_LOG_SCALE, MAX_MEAN, MIN_LOG_SCALE


@no_type_check
@compiled()
def _keep_nucleus(weights, least):
    """Set all but the largest weights that add up to `least` or more to 0; what is left, in all."""
    count, sum_kept = weights.shape[0], 0.0
    for _ in range(count):
        if sum_kept >= least:
            break
        largest = 0
        for k in range(count):
            if weights[k] > weights[largest]:
                largest = k
        sum_kept += weights[largest]
        weights[largest] = -weights[largest]
    total = 0.0
    for k in range(count):
        weights[k] = max(-weights[k], 0.0)
        total += weights[k]
    return total


@no_type_check
@compiled()
def _choose(logits, temperature, top_p, uniform, work):
    """A choice from `nucleus` of logits at a temperature; `work` has room for as many numbers."""
    count, likeliest = logits.shape[0], 0
    for k in range(count):
        if logits[k] > logits[likeliest]:
            likeliest = k
    if temperature == 0.0:
        return likeliest
    largest = logits[likeliest]
    total = 0.0
    for k in range(count):
        work[k] = math.exp((float(logits[k]) - largest) / temperature)
        total += work[k]
    if top_p < 1.0:
        total = _keep_nucleus(work[:count], top_p * total)
    threshold, passed = uniform * total, 0.0
    for k in range(count):
        passed += work[k]
        if passed > threshold:
            return k
    return likeliest


@no_type_check
@compiled()
def draw_categorical(parameters, uniforms, temperature, top_p, work, values, first, stop):
    """A level for each row from the most probable of softmax(parameters / temperature).

    Args:
        parameters: logits "r levels", or wider.
        uniforms: "r 1".
        temperature: above 0, or 0 for the most probable level.
        top_p: see `Controls`.
        work: "levels", float64.
        values: "r 1", written.
        first, stop: the rows to go through.
    """
    for r in range(first, stop):
        logits = parameters[r, : work.shape[0]]
        values[r, 0] = _choose(logits, temperature, top_p, uniforms[r, 0], work)


@no_type_check
@compiled()
def guide(parameters, images, guidance, first, stop):
    """Logits under guidance in place of those with the label; see `OutputHead.sample_guided`.

    Of logits, unlike those of a mixture, the sums that normalise them do not matter.

    Args:
        parameters: logits "r levels", or wider, changed: of the images, then of them without label.
        images: how many there are, half of the rows.
        guidance: 1 takes those with the label, 0 those without.
        first, stop: the images to go through.
    """
    scale = np.float32(guidance)
    for r in range(first, stop):
        row, without = parameters[r], parameters[images + r]
        for i in range(row.shape[0]):
            row[i] = without[i] + scale * (row[i] - without[i])


@no_type_check
@compiled()
def lay_around(parameters, predicted, components, logits, unit, first, stop):
    """Count the means of a mixture from a prediction; see `MixtureOfLogistics`.

    Args:
        parameters: "r p", or wider, as the head lays them out, changed.
        predicted: "r s".
        components: number of logistics.
        logits: numbers of a row before the means.
        unit: of the means around a prediction.
        first, stop: the rows to go through.
    """
    per_step = predicted.shape[1]
    for r in range(first, stop):
        row = parameters[r, logits:]
        for k in range(components):
            coefficient = components * 2 * per_step + k
            for s in range(per_step):
                shift = float(predicted[r, s])
                for earlier in range(s):
                    shift -= math.tanh(float(row[coefficient])) * float(predicted[r, earlier])
                    coefficient += components
                mean = unit * float(row[components * s + k])
                row[components * s + k] = np.float32(mean + shift)


@no_type_check
@compiled()
def draw_mixture(parameters, uniforms, mixture, work, values, first, stop):
    """The values of a step for each row from a mixture; see `MixtureOfLogistics`.

    Args:
        parameters: "r p", or wider, as the head lays them out.
        uniforms: "r s + 1".
        mixture: temperatures of the choice and of the width, top_p, number of logistics, numbers
            of a row before the means, which are more where there is a softmax too, and number of
            levels.
        work: float64, for as many numbers as there are components or levels.
        values: "r s", written.
        first, stop: the rows to go through.
    """
    mixture_temperature, scale_temperature, top_p, components, logits, levels = mixture
    per_step, choices = values.shape[1], min(logits, components + 1)
    for r in range(first, stop):
        k = _choose(parameters[r, :choices], mixture_temperature, top_p, uniforms[r, 0], work)
        if k >= components:
            for s in range(per_step):
                scores = parameters[r, choices + s * levels : choices + (s + 1) * levels]
                values[r, s] = _choose(scores, scale_temperature, top_p, uniforms[r, 1 + s], work)
            continue
        row = parameters[r, logits:]
        coefficient = components * 2 * per_step + k
        for s in range(per_step):
            mean = float(row[components * s + k])
            mean = min(max(mean, -MAX_MEAN), MAX_MEAN)
            for earlier in range(s):
                x = values[r, earlier] * (2.0 / (levels - 1)) - 1.0
                mean += math.tanh(float(row[coefficient])) * x
                coefficient += components
            log_scale = float(row[components * (per_step + s) + k])
            scale = math.exp(min(max(log_scale, MIN_LOG_SCALE), MAX_LOG_SCALE))
            u = uniforms[r, 1 + s]
            x = mean + scale_temperature * scale * math.log(u / (1.0 - u))
            level = np.rint((x + 1.0) / 2.0 * (levels - 1))
            values[r, s] = int(min(max(level, 0.0), levels - 1.0))
