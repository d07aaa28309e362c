from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from imagegen.cli.entry import compose
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.digits import Digits
from imagegen.heads.base import OutputHead
from imagegen.model.transformer import ImageTransformer
from imagegen.training.model_options import model_options
from tests.helpers import tiny_model

ATTENTION = {
    "linear": {"_target_": "imagegen.attention.linear.LinearAttention"},
    "softmax": {"_target_": "imagegen.attention.softmax.SoftmaxAttention"},
}
EMBEDDING = {
    "paper": {"_target_": "imagegen.model.embeddings.ValueAndSinusoid"},
    "neighbourhood": {"_target_": "imagegen.model.embeddings.Neighbourhood"},
}
GREY, COLOUR = ImageSpec(7, 5, 1, 17), ImageSpec(5, 4, 3)


def _images(spec: ImageSpec, n: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, spec.levels, (n, *spec.shape), dtype=torch.uint8, generator=generator)


def _stepped(model: ImageTransformer, sequence: Tensor) -> tuple[Tensor, list[int]]:
    parameters, state = model.step(None, model.initial_state(len(sequence)))
    outputs, sizes = [parameters], [state.nbytes]
    for position in range(sequence.shape[1] - 1):
        parameters, state = model.step(sequence[:, position], state)
        outputs.append(parameters)
        sizes.append(state.nbytes)
    return torch.stack(outputs, dim=1), sizes


@pytest.fixture(params=["grey", "colour"])
def spec(request: pytest.FixtureRequest) -> ImageSpec:
    return {"grey": GREY, "colour": COLOUR}[request.param]


MODERN = {"norm": "rms", "gated": True, "residual_scale": 0.5, "activation": "silu"}
MODELS: dict[str, dict[str, Any]] = {
    "linear-paper": {"norm_first": False},
    "linear-paper-pixel": {"norm_first": False, "tokens": "pixel"},
    "linear-neighbourhood": {},
    "linear-neighbourhood-pixel": {
        "tokens": "pixel",
        "n_classes": 3,
        "label_grid": 2,
        "flips": True,
    },
    "linear-neighbourhood-predicted": {"tokens": "pixel", "linear_prediction": True},
    "softmax-neighbourhood-predicted": {"tokens": "subpixel", "linear_prediction": True},
    "linear-neighbourhood-convolution": {"convolution": [1, 2], "tokens": "pixel"},
    "softmax-neighbourhood": MODERN,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, spec: ImageSpec) -> ImageTransformer:
    attention, embedding = request.param.split("-")[:2]
    return tiny_model(
        spec,
        attention=ATTENTION[attention],
        embedding=EMBEDDING[embedding],
        n_layers=2,
        **MODELS[request.param],
    ).double()


@torch.no_grad()
def test_both_forms_agree_at_every_position_and_split(model: ImageTransformer) -> None:
    sequence = model.raster.to_sequence(_images(model.spec))
    expected = model.parameters_of(sequence)
    torch.testing.assert_close(_stepped(model, sequence)[0], expected, rtol=1e-10, atol=1e-10)
    for split in range(1, sequence.shape[1] - 1):
        parameters, state = model.prefill(sequence[:, :split])
        torch.testing.assert_close(parameters, expected[:, split], rtol=1e-10, atol=1e-10)
        assert state.position == split + 1
        forked = state.clone()
        parameters, _ = model.step(sequence[:, split], forked)
        torch.testing.assert_close(parameters, expected[:, split + 1], rtol=1e-10, atol=1e-10)
        if split + 3 < sequence.shape[1]:
            parameters, _ = model.prefill(sequence[:, split : split + 3], state)
            torch.testing.assert_close(parameters, expected[:, split + 3], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_no_distribution_sees_its_own_or_a_later_value(model: ImageTransformer) -> None:
    sequence = model.raster.to_sequence(_images(model.spec))
    expected = model.parameters_of(sequence)
    for position in range(sequence.shape[1]):
        changed = sequence.clone()
        changed[:, position:] = (changed[:, position:].int() + 5) % model.spec.levels
        parameters = model.parameters_of(changed)
        assert torch.equal(parameters[:, : position + 1], expected[:, : position + 1])
        if position + 1 < sequence.shape[1]:
            assert not torch.equal(parameters[:, position + 1], expected[:, position + 1])


@torch.no_grad()
@pytest.mark.parametrize("embedding", EMBEDDING)
def test_state_keeps_its_size(embedding: str) -> None:
    model = tiny_model(ImageSpec(28, 28), embedding=EMBEDDING[embedding])
    _, sizes = _stepped(model, model.raster.to_sequence(_images(model.spec, 1)))
    assert len(set(sizes)) == 1


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (ImageSpec(28, 28), torch.float64),
        (ImageSpec(28, 28), torch.float32),
        # Rounding adds up along a sequence: the longest is tried where it could show.
        (ImageSpec(32, 32, 3), torch.float32),
    ],
    ids=["784-float64", "784-float32", "3072-float32"],
)
def test_forms_agree_over_whole_images(attention: str, spec: ImageSpec, dtype: torch.dtype) -> None:
    model = tiny_model(
        spec, attention=ATTENTION[attention], embedding=EMBEDDING["neighbourhood"], n_layers=2
    ).to(dtype)
    sequence = model.raster.to_sequence(_images(spec, 1))
    error = (_stepped(model, sequence)[0] - model.parameters_of(sequence)).abs().max().item()
    assert error < (1e-4 if dtype == torch.float32 else 1e-10)


@torch.no_grad()
def test_labels_reach_both_forms() -> None:
    model = tiny_model(
        COLOUR,
        embedding=EMBEDDING["neighbourhood"],
        tokens="pixel",
        n_classes=3,
        label_grid=2,
        flips=True,
    ).double()
    images = _images(COLOUR, 3)
    sequence, labels = model.raster.to_sequence(images), torch.tensor([2, 0, -1])
    expected = model.parameters_of(sequence, labels)
    state = model.initial_state(3, labels)
    values, stepped = None, []
    for position in range(sequence.shape[1]):
        parameters, state = model.step(values, state)
        stepped.append(parameters)
        values = sequence[:, position]
    torch.testing.assert_close(torch.stack(stepped, 1), expected, rtol=1e-10, atol=1e-10)
    parameters, forked = model.prefill(sequence[:, :7], labels=labels)
    torch.testing.assert_close(parameters, expected[:, 7], rtol=1e-10, atol=1e-10)
    parameters, _ = model.step(sequence[:, 7].repeat_interleave(2, dim=0), forked.clone().repeat(2))
    torch.testing.assert_close(
        parameters, expected[:, 8].repeat_interleave(2, dim=0), rtol=1e-10, atol=1e-10
    )
    without = model.parameters_of(sequence)
    assert torch.equal(without[2], expected[2])
    assert not torch.equal(without[:2], expected[:2])
    mirrored = model.bits_per_dim(images, labels, torch.tensor([1, 0, 0]))
    assert (mirrored == model.bits_per_dim(images, labels)).tolist() == [False, True, True]


def test_labels_are_withheld_in_training_only() -> None:
    model = tiny_model(GREY, n_classes=2, label_dropout=0.5)
    images, labels = _images(GREY, 200), torch.zeros(200, dtype=torch.int64)
    images[:] = images[:1]
    assert len(model.bits_per_dim(images, labels).unique()) == 1
    torch.manual_seed(0)
    with_label = model.train().bits_per_dim(images, labels)
    share = (with_label == model.eval().bits_per_dim(images)[0]).double().mean().item()
    assert 0.35 < share < 0.65


def test_uniform_model_scores_log2_of_the_levels() -> None:
    head = {"_target_": "imagegen.heads.categorical.Categorical"}
    for spec, bits in ((GREY, 4.087463), (COLOUR, 8.0)):
        model = tiny_model(spec, head=head)
        for parameter in model.head.parameters():
            torch.nn.init.zeros_(parameter)
        torch.testing.assert_close(
            model.bits_per_dim(_images(spec)), torch.full((2,), bits), rtol=1e-6, atol=0
        )


@torch.no_grad()
def test_bits_per_dim_counts_every_dimension() -> None:
    model = tiny_model(COLOUR).double()
    images = _images(COLOUR)
    sequence = images.flatten(1)
    parameters = model.parameters_of(model.raster.to_sequence(images))
    total = 0.0
    head: OutputHead = model.head
    for position in range(COLOUR.dims):
        total += head.log_prob(parameters[0, position], sequence[0, position, None]).item()
    expected = -total / torch.log(torch.tensor(2.0)).item() / COLOUR.dims
    assert model.bits_per_dim(images)[0].item() == pytest.approx(expected, rel=1e-6)


def _parameters(*overrides: str, spec: ImageSpec) -> int:
    from omegaconf import OmegaConf

    config: Any = OmegaConf.to_container(compose("train", overrides), resolve=False)
    model = ImageTransformer.from_options(spec, **model_options(config, Digits()))
    return sum(parameter.numel() for parameter in model.parameters())


def test_paper_models_have_the_papers_size() -> None:
    mnist = _parameters("experiment=mnist_paper", spec=ImageSpec(28, 28))
    cifar = _parameters("experiment=cifar10_paper", spec=ImageSpec(32, 32, 3))
    assert mnist == pytest.approx(6.36e6, rel=0.01)
    assert cifar == pytest.approx(12.68e6, rel=0.01)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n_layers": 0}, "model.n_layers=0"),
        ({"d_ff": 0}, "model.d_ff=0"),
        ({"dropout": 1.0}, "model.dropout=1.0"),
        ({"activation": "tanh"}, "choose one of relu, gelu, silu"),
        ({"d_model": 18}, "multiple of 4"),
        ({"norm": "batch"}, "model.norm=batch is unknown; choose one of layer, rms"),
        ({"tokens": "patch"}, "model.tokens=patch is unknown"),
        ({"label_dropout": 1.5}, "model.label_dropout=1.5 must be between 0 and 1"),
        ({"label_grid": 0}, "model.label_grid=0 must be at least 1"),
        ({"convolution": [2]}, r"model.convolution=\[2\] must be"),
        ({"n_classes": 0}, "n_classes=0 must be at least 1"),
        ({"head": {"_target_": "os.system"}}, "not one of imagegen's OutputHead"),
        (
            {"head": {"_target_": "imagegen.model.embeddings.Neighbourhood"}},
            "not one of imagegen's OutputHead",
        ),
        (
            {"attention": {**ATTENTION["linear"], "window": 3}},
            "LinearAttention does not know window; its options are .*chunk_size",
        ),
        (
            {"embedding": {**EMBEDDING["neighbourhood"], "neighbours": [[0, 1]]}},
            "before the predicted one",
        ),
        (
            {"embedding": EMBEDDING["paper"], "linear_prediction": True},
            "linear_prediction=true needs an embedding that sees neighbours, .* ValueAndSinusoid",
        ),
    ],
)
def test_impossible_models_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        tiny_model(GREY, **options)


def test_one_row_images_and_single_pixels_have_models() -> None:
    for spec in (ImageSpec(1, 1), ImageSpec(1, 9, 3), ImageSpec(9, 1)):
        model = tiny_model(spec, embedding=EMBEDDING["neighbourhood"])
        sequence = model.raster.to_sequence(_images(spec))
        torch.testing.assert_close(
            _stepped(model, sequence)[0], model.parameters_of(sequence), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("tokens", ["pixel", "subpixel"])
def test_prediction_begins_with_what_is_near(tokens: str) -> None:
    """Away from the borders an even image is foretold, and a smooth one costs little at once."""
    spec = ImageSpec(8, 8, 3)
    options = {"embedding": EMBEDDING["neighbourhood"], "tokens": tokens}
    model = tiny_model(spec, linear_prediction=True, **options)
    assert model.prediction is not None
    even = torch.tensor([10, 100, 250], dtype=torch.uint8).expand(1, 8, 8, 3)
    sequence = model.raster.to_sequence(even)
    step = torch.arange(sequence.shape[1])
    predicted = model._inputs(model._padded(sequence[:, :-1]), step, None)[1]
    inside = predicted.view(8, 8, 3)[1:, 1:-1]
    expected = torch.tensor([10, 100, 250]) * (2 / 255) - 1
    torch.testing.assert_close(inside, expected.expand_as(inside))

    slope = torch.arange(8) * 9
    smooth = (slope[:, None, None] + slope[:, None] + torch.arange(3) * 20).to(torch.uint8)[None]
    plain = tiny_model(spec, **options).bits_per_dim(smooth)
    assert model.bits_per_dim(smooth).item() < plain.item() - 1


def test_categorical_heads_have_no_use_for_a_prediction() -> None:
    categorical = {"_target_": "imagegen.heads.categorical.Categorical"}
    model = tiny_model(
        GREY, head=categorical, embedding=EMBEDDING["neighbourhood"], linear_prediction=True
    )
    assert model.prediction is None
    with pytest.raises(NotImplementedError, match="Categorical takes no prediction"):
        model.head(torch.zeros(1, 16), torch.zeros(1, 1))
