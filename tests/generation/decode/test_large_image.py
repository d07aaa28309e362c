"""A large image is drawn with a state no larger than a small one's."""

from __future__ import annotations

import resource

import numpy as np
import pytest
import torch

from imagegen.core.spec import ImageSpec
from imagegen.generation.sampling_loop import generate
from imagegen.model.transformer import ImageTransformer


@pytest.mark.slow
def test_an_image_of_196608_steps() -> None:
    spec = ImageSpec(256, 256, 3)
    torch.manual_seed(0)
    model = ImageTransformer.from_options(
        spec,
        attention={"_target_": "imagegen.attention.linear.LinearAttention"},
        head={"_target_": "imagegen.heads.mixture_of_logistics.MixtureOfLogistics"},
        embedding={"_target_": "imagegen.model.embeddings.ValueAndSinusoid"},
        n_layers=2,
        d_model=64,
        n_heads=2,
        d_ff=128,
        tokens="subpixel",
    ).eval()
    assert model.raster.length == 196_608
    with torch.inference_mode():
        _, first = model.step(None, model.initial_state(1))
        some = torch.zeros(1, 4096, 1, dtype=torch.uint8)
        assert model.prefill(some)[1].nbytes == first.nbytes
    next(generate(model, 1, seed=0))  # compiles, and allocates what stays
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    images = next(generate(model, 1, seed=1))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"state {first.nbytes:,} bytes; peak memory grew by {grown} KiB")
    assert images.shape == (1, 256, 256, 3)
    # Values differ to the end: nothing has run away.
    assert len(np.unique(images[0, -8:])) > 20
    # Each call makes its table of the positions' embeddings, 48 MiB, anew.
    assert grown < 64 * 1024
