"""Steps between tensors that stay where they are draw what PyTorch's own steps draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from imagegen import decode
from imagegen.decode.graph import GraphDecoder, why_not
from imagegen.drawing import Drawing, continue_sequences, initial_state, no_gradients
from imagegen.heads.controls import Controls
from imagegen.model import ImageTransformer
from imagegen.spec import ImageSpec
from tests.helpers import tiny_model

NEIGHBOURHOOD = {"_target_": "imagegen.embedding.Neighbourhood"}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
GREY, COLOUR = ImageSpec(5, 4, 1, 17), ImageSpec(4, 3, 3)


def _attention(name: str, **options: Any) -> dict[str, Any]:
    return {"attention": {"_target_": f"imagegen.attention.{name}", **options}}


MODELS: dict[str, tuple[ImageSpec, dict[str, Any]]] = {
    "paper": (GREY, {"norm_first": False, "activation": "relu", "n_layers": 2}),
    "default": (GREY, {"embedding": NEIGHBOURHOOD, "n_layers": 2, "convolution": [1, 1]}),
    "pixels": (
        COLOUR,
        {
            "embedding": NEIGHBOURHOOD,
            "tokens": "pixel",
            "n_classes": 3,
            "label_grid": 2,
            "flips": True,
        },
    ),
    "favor": (GREY, _attention("linear.LinearAttention", feature_map="favor")),
    "retention": (GREY, _attention("retention.Retention")),
    "ssd": (GREY, _attention("ssd.StateSpaceDuality")),
    "gla": (GREY, _attention("gla.GatedLinearAttention")),
    "gated_delta": (GREY, _attention("gated_delta.GatedDeltaNet")),
    "local": (GREY, _attention("local.LocalAttention", window=3)),
}


def _draw(
    model: ImageTransformer, decoder: decode.Decoder | None, seed: int, visible: int
) -> np.ndarray:
    """Five images from their first `visible` steps on, given or drawn."""
    labels = None if model.n_classes is None else (0, 2, -1)
    drawing = Drawing(seed, Controls(), labels, None, decoder)
    streams = [(image, 0) for image in range(5)]
    with no_gradients(model):
        state = initial_state(model, range(5), 5, drawing)
        if visible:
            values = model.raster.values_per_step
            prefix = np.random.default_rng(0).integers(0, model.spec.levels, (5, visible, values))
            known = torch.from_numpy(prefix.astype(np.uint8)).to(model.device)
            parameters, state = model.prefill(known, state)
        else:
            parameters, state = model.step(None, state)
        return continue_sequences(model, parameters, state, streams, drawing).cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_images(name: str, device: str) -> None:
    spec, options = MODELS[name]
    model = tiny_model(spec, **options).to(device)
    assert why_not(model) is None
    decoder = GraphDecoder(model)
    # The recorded step is used again, from another beginning.
    for seed, visible in ((0, 0), (1, 0), (2, 6)):
        expected = _draw(model, None, seed, visible)
        drawn = _draw(model, decoder, seed, visible)
        if device == "cpu":
            assert np.array_equal(drawn, expected)
        else:  # a level may be rounded otherwise, and the rest of an image then differs
            assert (drawn == expected).reshape(5, -1).all(axis=1).mean() >= 0.6


def test_a_growing_state_is_left_to_pytorch() -> None:
    model = tiny_model(GREY, **_attention("softmax.SoftmaxAttention"))
    assert "grows" in str(why_not(model))
    with pytest.raises(ValueError, match="grows"):
        GraphDecoder(model)


def test_known_sequences() -> None:
    model = tiny_model(GREY)
    sequence = torch.randint(17, (3, 20, 1), dtype=torch.uint8)
    with torch.inference_mode():
        expected = model.eval().parameters_of(sequence)
        found = GraphDecoder(model).parameters(sequence.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@needs_gpu
def test_it_is_chosen_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SHORTEST", 1)
    decoder = decode.choose_decoder(tiny_model(GREY).cuda(), Controls())
    assert isinstance(decoder, GraphDecoder)
    _draw(decoder.model, decoder, 0, 0)
