"""Models of these mechanisms generate, and draw what the parallel form predicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from imagegen.core.spec import ImageSpec
from imagegen.generation.sampling_loop import complete, generate
from imagegen.model.transformer import ImageTransformer
from tests.helpers import tiny_model

SPEC = ImageSpec(6, 5, 3)
ATTENTION: dict[str, dict[str, Any]] = {
    "local": {"_target_": "imagegen.attention.local.LocalAttention", "window": 7},
    "strided": {"_target_": "imagegen.attention.strided.StridedAttention"},
    "interleaved": {
        "_target_": "imagegen.attention.strided.StridedAttention",
        "combine": "interleaved",
    },
    "lsh": {
        "_target_": "imagegen.attention.lsh.LSHAttention",
        "rounds": 2,
        "n_buckets": 4,
        "chunk_size": 16,
    },
    "hybrid": {
        "_target_": "imagegen.attention.hybrid.HybridAttention",
        "pattern": ["linear", {"name": "local", "window": 9}, "softmax"],
    },
}


@pytest.fixture(scope="module", params=ATTENTION)
def model(request: pytest.FixtureRequest) -> ImageTransformer:
    return tiny_model(
        SPEC,
        attention=ATTENTION[request.param],
        embedding={"_target_": "imagegen.model.embeddings.Neighbourhood"},
        n_layers=3,
    )


def _all(*args: Any, **kwargs: Any) -> np.ndarray:
    return np.concatenate(list(generate(*args, **kwargs)))


@torch.no_grad()
def test_prefix_and_steps_are_the_parallel_form(model: ImageTransformer) -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, *SPEC.shape), np.uint8))
    sequence = model.raster.to_sequence(images)
    model.double()
    expected = model.parameters_of(sequence)
    parameters, state = model.prefill(sequence[:, :31])
    torch.testing.assert_close(parameters, expected[:, 31], rtol=1e-10, atol=1e-10)
    for position in range(32, sequence.shape[1]):
        parameters, state = model.step(sequence[:, position - 1], state)
        torch.testing.assert_close(parameters, expected[:, position], rtol=1e-10, atol=1e-10)
    model.float()


def test_an_image_does_not_depend_on_its_company(model: ImageTransformer) -> None:
    expected = _all(model, 17, seed=3)
    assert len(np.unique(expected.reshape(17, -1), axis=0)) == 17
    for n, batch_size in ((1, 1), (17, 7)):
        assert np.array_equal(_all(model, n, seed=3, batch_size=batch_size), expected[:n])


def test_completions_keep_what_is_visible(model: ImageTransformer) -> None:
    images = _all(model, 3, seed=1)
    drawn = complete(model, images, [2, 2, 5], completions=2, seed=9)
    for image, visible, continuations in zip(images, (2, 2, 5), drawn, strict=True):
        assert np.array_equal(continuations[:, :visible], image[None, :visible].repeat(2, axis=0))
        assert not np.array_equal(continuations[0], continuations[1])
