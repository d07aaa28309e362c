"""Models whose images can all be enumerated, and whether completions follow their probabilities."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from imagegen.core.spec import ImageSpec
from imagegen.generation.particles import Report
from imagegen.generation.sampling_loop import complete, generate
from imagegen.generation.sampling_request import kept_steps
from imagegen.model.transformer import ImageTransformer
from tests.helpers import tiny_model
from tests.model.helpers import NEIGHBOURHOOD

CATEGORICAL = {"_target_": "imagegen.heads.categorical.Categorical"}
TOYS: dict[str, tuple[ImageSpec, dict[str, Any]]] = {
    "grey": (ImageSpec(3, 3, 1, 3), {"head": CATEGORICAL}),
    "sub-pixels": (ImageSpec(2, 2, 2, 3), {"head": CATEGORICAL}),
    "pixels": (ImageSpec(2, 2, 2, 3), {"tokens": "pixel"}),
}


def toy(kind: str, **more: Any) -> ImageTransformer:
    spec, options = TOYS[kind]
    model = tiny_model(spec, seed=3, **{"embedding": NEIGHBOURHOOD, **options, **more})
    with torch.no_grad():
        # Values have to depend on each other more than those of an untrained model do.
        model.head.projection.weight.mul_(3)
    return model


def every_image(spec: ImageSpec) -> torch.Tensor:
    values = list(itertools.product(range(spec.levels), repeat=spec.dims))
    return torch.tensor(values, dtype=torch.uint8).view(-1, *spec.shape)


def exact_conditional(
    model: ImageTransformer,
    image: np.ndarray,
    visible: np.ndarray,
    weighed: torch.Tensor,
    drawn: torch.Tensor,
) -> tuple[np.ndarray, np.ndarray, float]:
    """The images that keep the visible pixels, their probabilities, and that of the kept values.

    Kept steps count by log-probabilities `weighed`, the others by those `drawn`, both "image n", of
    every image. The last probability is given the values before the first missing one.
    """
    every = every_image(model.spec).numpy()
    fits = (every == image)[:, visible].reshape(len(every), -1).all(axis=1)
    kept = kept_steps(model, visible)
    logs = torch.where(torch.from_numpy(kept), weighed, drawn)[torch.from_numpy(fits)]
    joint = logs[:, int(kept.argmin()) :].sum(dim=1).double().exp().numpy()
    return every[fits], joint / joint.sum(), float(joint.sum())


@torch.no_grad()
def log_prob_of_all(model: ImageTransformer, **options: Any) -> torch.Tensor:
    return model.log_prob(every_image(model.spec), **options).sum(dim=-1)


def _chi_squared(drawn: np.ndarray, images: np.ndarray, exact: np.ndarray) -> tuple[float, int]:
    """Hotelling's statistic of completions "run k h w c" and its degrees of freedom.

    Runs are independent, the completions of one are not. Rare images are left out.
    """
    runs, per_run = drawn.shape[:2]
    found = (drawn[:, :, None] == images).reshape(runs, per_run, len(images), -1).all(axis=3)
    assert found.any(axis=2).all()
    likely = np.argsort(-exact)[:6]
    likely = likely[exact[likely] * runs * per_run > 20]
    assert len(likely) > 2
    shares = found[:, :, likely].mean(axis=1)
    distance = shares.mean(axis=0) - exact[likely]
    # Images that are never drawn would leave it singular.
    covariance = np.cov(shares.T) / runs + 1e-9 * np.eye(len(likely))
    return float(distance @ np.linalg.solve(covariance, distance)), len(likely)


def agrees_with(drawn: np.ndarray, images: np.ndarray, exact: np.ndarray) -> bool:
    statistic, freedom = _chi_squared(drawn, images, exact)
    return statistic < freedom + 4 * np.sqrt(2 * freedom)


def mask_of(kind: str) -> np.ndarray:
    """Several runs of missing and of kept pixels, the first of them kept."""
    hidden = {"grey": [1, 3, 4, 7], "sub-pixels": [1, 3], "pixels": [0, 2]}[kind]
    spec = TOYS[kind][0]
    visible = np.ones(spec.height * spec.width, dtype=bool)
    visible[hidden] = False
    return visible.reshape(spec.height, spec.width)


RUNS, COMPLETIONS = 40, 16


def complete_in_runs(
    model: ImageTransformer, visible: np.ndarray, **options: Any
) -> tuple[np.ndarray, np.ndarray, list[Report]]:
    """An image, and completions of it in independent runs: copies with numbers of their own."""
    # As likely as those that the model draws.
    image = next(generate(model, 1, seed=2))[0]
    reports: list[Report] = []
    drawn = complete(
        model,
        np.repeat(image[None], RUNS, axis=0),
        np.repeat(visible[None], RUNS, axis=0),
        COMPLETIONS,
        particles=128,
        report=lambda _, report: reports.append(report),
        **options,
    )
    return image, drawn, reports
