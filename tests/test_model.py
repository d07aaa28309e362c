from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from imagegen.cli import compose
from imagegen.errors import UserError
from imagegen.heads.base import OutputHead
from imagegen.model import ImageTransformer
from imagegen.spec import ImageSpec
from tests.helpers import tiny_model

ATTENTION = {
    "linear": {"_target_": "imagegen.attention.linear.LinearAttention"},
    "softmax": {"_target_": "imagegen.attention.softmax.SoftmaxAttention"},
}
EMBEDDING = {
    "paper": {"_target_": "imagegen.embedding.ValueAndSinusoid"},
    "neighbourhood": {"_target_": "imagegen.embedding.Neighbourhood"},
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


@pytest.fixture(params=["linear-paper", "linear-neighbourhood", "softmax-neighbourhood"])
def model(request: pytest.FixtureRequest, spec: ImageSpec) -> ImageTransformer:
    attention, embedding = request.param.split("-")
    return tiny_model(
        spec,
        attention=ATTENTION[attention],
        embedding=EMBEDDING[embedding],
        n_layers=2,
        norm_first=embedding == "neighbourhood",
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
@pytest.mark.parametrize("spec", [ImageSpec(28, 28), ImageSpec(32, 32, 3)], ids=["784", "3072"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forms_agree_over_whole_images(attention: str, spec: ImageSpec, dtype: torch.dtype) -> None:
    model = tiny_model(
        spec, attention=ATTENTION[attention], embedding=EMBEDDING["neighbourhood"], n_layers=2
    ).to(dtype)
    sequence = model.raster.to_sequence(_images(spec, 1))
    error = (_stepped(model, sequence)[0] - model.parameters_of(sequence)).abs().max().item()
    assert error < (1e-4 if dtype == torch.float32 else 1e-10)


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
        total += head.log_prob(parameters[0, position], sequence[0, position]).item()
    expected = -total / torch.log(torch.tensor(2.0)).item() / COLOUR.dims
    assert model.bits_per_dim(images)[0].item() == pytest.approx(expected, rel=1e-6)


def _parameters(*overrides: str, spec: ImageSpec) -> int:
    from omegaconf import OmegaConf

    config: Any = OmegaConf.to_container(compose("train", overrides), resolve=False)
    model = ImageTransformer(
        spec, attention=config["attention"], head=config["head"], **config["model"]
    )
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
        ({"activation": "tanh"}, "choose one of relu, gelu"),
        ({"d_model": 18}, "multiple of 4"),
        ({"head": {"_target_": "os.system"}}, "not one of imagegen's OutputHead"),
        (
            {"head": {"_target_": "imagegen.embedding.Neighbourhood"}},
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
