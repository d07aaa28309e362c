"""Bits of pixels and what was expected instead, against the chain rule written out in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.evaluation.scores import score_images
from imagegen.evaluation.surprise import bits_of_pixels, distribution_at, likeliest
from imagegen.generation.sampling_loop import generate
from imagegen.heads.controls import Controls
from imagegen.model.transformer import ImageTransformer
from tests.helpers import tiny_model

SPEC = ImageSpec(3, 4, 3, 6)
MIXTURE = {"_target_": "imagegen.heads.mixture_of_logistics.MixtureOfLogistics", "n_mixtures": 3}
CATEGORICAL = {"_target_": "imagegen.heads.categorical.Categorical"}
NEIGHBOURHOOD = {"_target_": "imagegen.model.embeddings.Neighbourhood"}
MODELS: dict[str, dict[str, Any]] = {
    "categorical": {"head": CATEGORICAL},
    "mixture of subpixels": {"head": MIXTURE},
    "mixture of pixels": {"head": MIXTURE, "tokens": "pixel", "n_classes": 2, "orders": 2},
    "any order": {
        "head": MIXTURE,
        "tokens": "pixel",
        "embedding": NEIGHBOURHOOD,
        "order": "any",
        "linear_prediction": True,
    },
}
LABELS = np.array([1, 0, -1])


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> ImageTransformer:
    made = tiny_model(SPEC, **MODELS[request.param]).double()
    with torch.no_grad():
        # Far from a start at which all pixels are alike.
        made.head.projection.weight.mul_(4)
    return made


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(1).integers(0, SPEC.levels, (3, *SPEC.shape)).astype(np.uint8)


def probabilities_of(model: ImageTransformer, image: np.ndarray, label: int) -> np.ndarray:
    """Of every level of every value given those before it, "h w c levels": slow, step by step."""
    found = np.empty((*image.shape, SPEC.levels))
    state = model.initial_state(1, torch.tensor([label]))
    per_step = model.raster.values_per_step
    flat = torch.from_numpy(image).flatten()
    values = None
    with torch.no_grad():
        for first in range(0, len(flat), per_step):
            parameters, state = model.step(values, state)
            values = flat[first : first + per_step].view(1, per_step)
            for offset in range(per_step):
                place = np.unravel_index(first + offset, image.shape)
                for level in range(SPEC.levels):
                    asked = values.clone()
                    asked[0, offset] = level
                    log_prob = model.head.log_prob(parameters, asked)[0, offset]
                    found[(*place, level)] = math.exp(log_prob)
    np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-12)
    return found


def test_everything_is_what_the_chain_rule_says(
    model: ImageTransformer, images: np.ndarray
) -> None:
    bits = bits_of_pixels(model, images, LABELS, batch_size=2)
    expected = likeliest(model, images, LABELS, batch_size=2)
    assert (bits.dtype, bits.shape) == (np.float64, images.shape[:3])
    for image, label, map_, best in zip(images, LABELS.tolist(), bits, expected, strict=True):
        known = probabilities_of(model, image, label)
        own = np.take_along_axis(known, image[..., None].astype(int), axis=-1)
        np.testing.assert_allclose(map_, -np.log2(own).sum(axis=(2, 3)), rtol=1e-10)
        np.testing.assert_array_equal(best, known.argmax(axis=-1))
        for place in np.ndindex(*image.shape):
            found = distribution_at(model, image, *place, label=label)
            np.testing.assert_allclose(found, known[place], rtol=1e-9, atol=1e-15)
    # Pixels and values differ, or a mixture of them would pass.
    assert bits.std() > 0.1
    assert len(np.unique(expected)) > 1


def test_maps_sum_to_the_bits_of_the_image(images: np.ndarray) -> None:
    model = tiny_model(SPEC, head=MIXTURE, tokens="pixel").train()
    done: list[float] = []
    bits = bits_of_pixels(model, images, batch_size=2, progress=done.append)
    np.testing.assert_allclose(
        bits.sum(axis=(1, 2)) / SPEC.dims, score_images(model, images), rtol=1e-6
    )
    assert done == [2, 1]
    assert model.training
    distribution_at(model, images[0], 0, 0)
    likeliest(model, images[:1])
    assert model.training


def test_an_image_drawn_at_temperature_0_is_its_own_likeliest(model: ImageTransformer) -> None:
    drawn = next(generate(model, 2, seed=0, controls=Controls(temperature=0)))
    np.testing.assert_array_equal(likeliest(model, drawn), drawn)


def test_later_values_do_not_matter(model: ImageTransformer, images: np.ndarray) -> None:
    changed = images[0].copy()
    changed.flat[17:] = SPEC.levels - 1 - changed.flat[17:]
    place = tuple(int(index) for index in np.unravel_index(17, SPEC.shape))
    first, second = (distribution_at(model, image, *place) for image in (images[0], changed))
    np.testing.assert_array_equal(first, second)
    assert first.sum() == pytest.approx(1, abs=1e-12)


def test_many_steps_are_taken_in_pieces(
    images: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(SPEC, head=MIXTURE, tokens="pixel")
    whole = likeliest(model, images)
    monkeypatch.setattr("imagegen.evaluation.surprise.STEPS", 5)
    np.testing.assert_array_equal(likeliest(model, images), whole)


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ((3, 0, 0), "row=3, but it must be a whole number from 0 to 2"),
        ((0, -1, 0), "column=-1, but it must be a whole number from 0 to 3"),
        ((0, 0, 3), "channel=3, but it must be a whole number from 0 to 2"),
    ],
)
def test_places_outside_are_refused(
    images: np.ndarray, place: tuple[int, int, int], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        distribution_at(tiny_model(SPEC), images[0], *place)
