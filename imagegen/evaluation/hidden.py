"""Bits per hidden value: what a model knows of the pixels that are missing, given those kept.

    -log2 p(hidden | kept) = log2 p(kept) - log2 p(all)

is exact where all that is kept comes before all that is hidden in the order of the model, and in
the orientation in which it completes the image. Of other regions, models of raster order know
p(kept) by the estimate of their particles only (see `imagegen.generation.particles`). Its logarithm
is too low on average, and so are the bits: less so with more particles.

Axes: `n` image, `h w c` height, width, channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64, UInt8

from imagegen.core.inference import inference
from imagegen.core.progress import image_progress
from imagegen.data.regions import Region
from imagegen.generation.particles import Report, draw_particles
from imagegen.generation.sampling_request import (
    SamplingRequest,
    first_pixels,
    kept_steps,
    knows_any_order,
)
from imagegen.generation.turned import Turned, needs_particles, particles_for
from imagegen.model.transformer import ImageTransformer


def score_region(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    region: Region,
    labels: Int64[np.ndarray, " n"] | None,
    particles: int | None,
    batch_size: int,
) -> tuple[Float64[np.ndarray, " n"], dict[str, Any]]:
    """`score_hidden` for a region of each image, and what the result says of it.

    Raises:
        UserError: for a region that the images do not have, and a number of particles that has no
        effect.
    """
    height, width = model.spec.height, model.spec.width
    visible = np.stack([region.visible(height, width, 0, i) for i in range(len(images))])
    count = particles_for(model, visible, particles)
    request = None if count is None else _request(model, labels)
    with image_progress("evaluating", len(images)) as advance:
        scores, reports = score_hidden(
            model, images, visible, count or 1, batch_size, advance, labels, request
        )
    few = sum(report.collapsed for report in reports.values())
    return scores, {
        "visible": region.typed,
        "kept": float(visible.mean()),
        "particles": count,
        "few_particles": few,
        "loop": None if request is None else request.loop,
    }


def in_words(result: Mapping[str, Any]) -> str:
    """What was visible, and how far the score can be trusted."""
    words = f"visible={result['visible']}"
    if result["particles"] is None:
        return words
    words += f", by {result['particles']} particles, {result['loop']}: too low rather than too high"
    few = result["few_particles"]
    return f"{words}, above all for {few} images that were left with few" if few else words


def score_hidden(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    visible: Bool[np.ndarray, "n h w"],
    particles: int,
    batch_size: int,
    progress: Callable[[float], None] | None = None,
    labels: Int64[np.ndarray, " n"] | None = None,
    request: SamplingRequest | None = None,
) -> tuple[Float64[np.ndarray, " n"], dict[int, Report]]:
    """Bits per hidden value of each image, and what became of its particles where it needs them.

    Args:
        model, images, batch_size, progress, labels: as in `score_images`.
        visible: the pixels that are kept; at least one of each image is hidden.
        particles: of each image that needs them.
        request: how they are drawn; by default, as images of seed 0 of these labels are.
    """
    if knows_any_order(model):
        return _by_its_own_order(model, images, visible, batch_size, progress, labels), {}
    turned = Turned.of(model, images, visible)
    kept = np.stack([kept_steps(model, each) for each in turned.visible])
    needing = [needs_particles(model, each) for each in kept]
    if request is None and any(needing):
        request = _request(model, labels)
    nats = np.empty(len(images))
    reports: dict[int, Report] = {}
    for first in range(0, len(images), batch_size):
        batch = slice(first, first + batch_size)
        given, orientation = np.array(turned.images[batch]), turned.orientation[batch]
        known = None if labels is None else labels[batch]
        log_prob = _log_prob(model, given, known, orientation)
        for i, image in enumerate(given, first):
            # The kept steps that come before all others cancel.
            nats[i] = -log_prob[i - first, kept[i].argmin() :].sum()
            if needing[i]:
                assert request is not None
                told = (request, particles, int(turned.orientation[i]))
                reports[i] = draw_particles(model, image, kept[i], i, [0], *told)[1]
                nats[i] += reports[i].log_evidence
            if progress is not None:
                progress(1)
    return nats / _hidden_values(model, visible) / math.log(2), reports


def _request(model: ImageTransformer, labels: Int64[np.ndarray, " n"] | None) -> SamplingRequest:
    return SamplingRequest.of(model, 0, None, None if labels is None else labels.tolist(), None)


def _log_prob(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    labels: Int64[np.ndarray, " n"] | None,
    orientation: Int64[np.ndarray, " n"],
) -> Float64[np.ndarray, "n steps"]:
    known = None if labels is None else torch.from_numpy(labels).to(model.device)
    turns = torch.from_numpy(orientation).to(model.device)
    with inference(model):
        found = model.log_prob(torch.from_numpy(images).to(model.device), known, turns)
    summed: np.ndarray = found.cpu().double().sum(dim=-1).numpy()
    return summed


def _by_its_own_order(
    model: ImageTransformer,
    images: UInt8[np.ndarray, "n h w c"],
    visible: Bool[np.ndarray, "n h w"],
    batch_size: int,
    progress: Callable[[float], None] | None,
    labels: Int64[np.ndarray, " n"] | None,
) -> Float64[np.ndarray, " n"]:
    """`score_hidden` of a model that takes the visible pixels first."""
    bits = np.empty(len(images))
    for first in range(0, len(images), batch_size):
        batch = slice(first, first + batch_size)
        given = torch.from_numpy(np.array(images[batch])).to(model.device)
        known = None if labels is None else torch.from_numpy(labels[batch]).to(model.device)
        with inference(model):
            found = model.bits_per_dim(given, known, visible=first_pixels(model, visible[batch]))
        bits[batch] = found.cpu().double().numpy()
        if progress is not None:
            progress(len(given))
    return bits


def _hidden_values(
    model: ImageTransformer, visible: Bool[np.ndarray, "n h w"]
) -> Int64[np.ndarray, " n"]:
    hidden: np.ndarray = (~visible).sum(axis=(1, 2)) * model.spec.channels
    return hidden
