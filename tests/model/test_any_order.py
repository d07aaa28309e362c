"""Models of any order: what comes first, what is seen, and that all forms agree on it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hydra.utils import get_class
from torch import Tensor

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.core.errors import UserError
from imagegen.core.installation import PROJECT_ROOT
from imagegen.core.spec import ImageSpec
from imagegen.model.embeddings import Raster
from imagegen.model.known_neighbourhood import ADJACENT, KnownNeighbourhood
from imagegen.model.transformer import ImageTransformer
from tests.helpers import save_tiny_checkpoint, tiny_model

NEIGHBOURHOOD = {"_target_": "imagegen.model.embeddings.Neighbourhood"}
MIXTURE = {"_target_": "imagegen.heads.mixture_of_logistics.MixtureOfLogistics", "n_mixtures": 2}
CATEGORICAL = {"_target_": "imagegen.heads.categorical.Categorical"}
GREY, COLOUR = ImageSpec(4, 4, 1, 17), ImageSpec(4, 3, 3)
REGIONS = ("nothing", "hole", "scattered", "all but one")


def any_model(spec: ImageSpec, **options: Any) -> ImageTransformer:
    chosen = {"embedding": NEIGHBOURHOOD, "n_layers": 2, "order": "any", **options}
    model = tiny_model(spec, **chosen).double()
    if model.prediction is not None:
        # As trained: many weights start at zero, where nothing would show.
        torch.nn.init.normal_(model.prediction.weight, std=0.3)
    return model


def images_of(spec: ImageSpec, n: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, spec.levels, (n, *spec.shape), dtype=torch.uint8, generator=generator)


def region(name: str, spec: ImageSpec, n: int = 2) -> Tensor:
    """Visible pixels; those of the images differ where that is possible, but not in number."""
    visible = torch.zeros(n, spec.height, spec.width, dtype=torch.bool)
    if name == "left":
        visible[:, :, : spec.width // 2] = True
    elif name == "hole":
        visible[:] = True
        visible[:, 1:-1, 1:2] = False
    elif name == "scattered":
        visible.view(n, -1)[0, ::2] = True
        count = int(visible[0].sum())
        visible.view(n, -1)[1:, -count:] = True
    elif name == "all but one":
        visible[:] = True
        visible[0, 0, 0] = False
        visible[1:, -1, -1] = False
    return visible


def stepped(model: ImageTransformer, sequence: Tensor, visible: Tensor) -> Tensor:
    state = model.initial_state(len(sequence), visible=visible)
    values, outputs, sizes = None, [], set()
    for position in range(sequence.shape[1]):
        parameters, state = model.step(values, state)
        outputs.append(parameters)
        sizes.add(sum(tensor.nbytes for tensor in state.canvas.tensors()))  # type: ignore[union-attr]
        values = sequence[:, position]
    assert len(sizes) == 1
    return torch.stack(outputs, dim=1)


MODELS: dict[str, tuple[ImageSpec, dict[str, Any]]] = {
    "grey": (GREY, {}),
    "predicted": (GREY, {"linear_prediction": True}),
    "sub-pixels": (COLOUR, {"tokens": "subpixel", "linear_prediction": True}),
    "pixels": (
        COLOUR,
        {
            "tokens": "pixel",
            "linear_prediction": True,
            "n_classes": 3,
            "label_grid": 2,
            "flips": True,
        },
    ),
    "categorical": (GREY, {"head": CATEGORICAL}),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> ImageTransformer:
    spec, options = MODELS[request.param]
    return any_model(spec, **options)


@torch.no_grad()
@pytest.mark.parametrize("name", REGIONS)
def test_all_forms_agree_at_every_position_and_split(model: ImageTransformer, name: str) -> None:
    visible = region(name, model.spec)
    sequence = model.raster.to_sequence(images_of(model.spec), visible)
    expected = model.parameters_of(sequence, visible=visible)

    def close(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

    close(stepped(model, sequence, visible), expected)
    for split in range(1, sequence.shape[1] - 1):
        state = model.initial_state(2, visible=visible)
        parameters, state = model.prefill(sequence[:, :split], state)
        close(parameters, expected[:, split])
        assert state.position == split + 1
        parameters, _ = model.step(sequence[:, split], state.clone())
        close(parameters, expected[:, split + 1])
        if split + 3 < sequence.shape[1]:
            parameters, _ = model.prefill(sequence[:, split : split + 3], state)
            close(parameters, expected[:, split + 3])
        repeated = sequence[:, split].repeat_interleave(2, dim=0)
        parameters, _ = model.step(repeated, state.repeat(2))
        close(parameters, expected[:, split + 1].repeat_interleave(2, dim=0))


@torch.no_grad()
@pytest.mark.parametrize("name", REGIONS)
def test_no_distribution_sees_its_own_or_a_later_value(model: ImageTransformer, name: str) -> None:
    visible = region(name, model.spec)
    sequence = model.raster.to_sequence(images_of(model.spec), visible)
    expected = model.parameters_of(sequence, visible=visible)
    for position in range(sequence.shape[1]):
        changed = sequence.clone()
        changed[:, position:] = (changed[:, position:].int() + 5) % model.spec.levels
        parameters = model.parameters_of(changed, visible=visible)
        assert torch.equal(parameters[:, : position + 1], expected[:, : position + 1])
        # Each value is seen at once: by the attention, if by nothing else.
        if position + 1 < sequence.shape[1]:
            assert not torch.equal(parameters[:, position + 1], expected[:, position + 1])


def test_the_order_of_a_region_is_the_visible_pixels_first() -> None:
    visible = torch.tensor([[[False, True], [True, False]], [[True, True], [False, False]]])
    images = torch.arange(12, dtype=torch.uint8).view(1, 2, 2, 3).repeat(2, 1, 1, 1)
    raster = Raster(ImageSpec(2, 2, 3))
    sequence = raster.to_sequence(images, visible)
    assert sequence[0].flatten().tolist() == [3, 4, 5, 6, 7, 8, 0, 1, 2, 9, 10, 11]
    assert sequence[1].flatten().tolist() == list(range(12))
    assert torch.equal(raster.to_images(sequence, visible), images)
    pixels = Raster(ImageSpec(2, 2, 3), "pixel").to_sequence(images, visible)
    assert torch.equal(pixels.flatten(1), sequence.flatten(1))


def _seen(model: ImageTransformer, image: np.ndarray, order: list[int], t: int) -> list[Any]:
    """What step t sees of an image, by a slow double loop: levels of neighbours, None unknown."""
    raster, spec = model.raster, model.spec
    per, values = raster.steps_per_pixel, raster.values_per_step
    steps = [(place // per, place % per) for place in order]  # pixel and channel of each step
    pixel, channel = steps[t]
    y, x = divmod(pixel, spec.width)
    earlier = set(order[:t])
    neighbours = [
        (a, b)
        for a in range(-3, 4)
        for b in range(-3, 4)
        if abs(a) < spec.height
        and abs(b) < spec.width
        # A diamond with the corners cut off: what turning and mirroring makes of the default.
        and (a, b) != (0, 0)
        and (a * a + b * b <= 5 or (a * b == 0))
    ]
    neighbours.sort(key=lambda offset: (offset[0] ** 2 + offset[1] ** 2, offset))
    seen: list[Any] = []
    for a, b in neighbours:
        inside = 0 <= y + a < spec.height and 0 <= x + b < spec.width
        place = ((y + a) * spec.width + x + b) * per + channel
        if inside and place in earlier:
            seen.append(image.reshape(-1, values)[place].tolist())
        else:
            seen.append(None)
    for back in range(1, per):
        place = pixel * per + channel - back
        seen.append(image.reshape(-1, values)[place].tolist() if back <= channel else None)
    seen.append(image.reshape(-1, values)[order[t - 1]].tolist() if t else None)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("name", REGIONS)
def test_the_embedding_is_the_slow_double_loop(model: ImageTransformer, name: str) -> None:
    visible, images = region(name, model.spec), images_of(model.spec)
    embedding, spec = model.embedding, model.spec
    assert isinstance(embedding, KnownNeighbourhood)
    raster, values = model.raster, model.raster.values_per_step
    per = raster.steps_per_pixel
    state = model.initial_state(2, visible=visible)
    assert state.canvas is not None
    steps = torch.arange(raster.length)
    canvas = state.canvas.taken(raster.to_sequence(images, visible), steps)
    x, numbers = embedding(canvas, steps)
    predicted = None if model.prediction is None else model.prediction(numbers)
    table = embedding.value.weight.view(-1, values, spec.levels + 1, embedding.d_model)
    for image, kept in enumerate(visible.flatten(1)):
        pixels = sorted(range(len(kept)), key=lambda pixel: (not kept[pixel], pixel))
        order = [pixel * per + channel for pixel in pixels for channel in range(per)]
        for t, place in enumerate(order):
            seen = _seen(model, images[image].numpy(), order, t)
            scaled = [
                [0.0] * values if each is None else [2 * v / (spec.levels - 1) - 1 for v in each]
                for each in seen
            ]
            flags = [float(each is not None) for each in seen]
            numbers_seen = [v for each in scaled for v in each] + flags
            given = torch.tensor(numbers_seen, dtype=torch.float64)
            row, column = divmod(place // per, spec.width)
            expected = embedding.number(given) + embedding.row.weight[row]
            expected = expected + embedding.column.weight[column]
            expected = expected + embedding.channel.weight[place % per]
            for k, each in enumerate(seen):
                for s in range(values):
                    level = spec.levels if each is None else each[s]
                    expected = expected + table[k, s, level]
            if t:
                row, column = divmod(order[t - 1] // per, spec.width)
                expected = expected + embedding.row_before.weight[row]
                expected = expected + embedding.column_before.weight[column]
            expected = expected + embedding.kept.weight[int(kept[place // per])]
            torch.testing.assert_close(x[image, t], expected, rtol=1e-12, atol=1e-12)
            if predicted is not None:
                pattern = sum(
                    1 << bit for bit, k in enumerate(embedding.adjacent) if k >= 0 and flags[k]
                )
                weight = model.prediction.weight.unflatten(0, (16, values))[pattern]
                torch.testing.assert_close(
                    predicted[image, t], weight @ given, rtol=1e-12, atol=1e-12
                )


def test_a_prediction_begins_with_the_adjacent_pixels() -> None:
    spec = ImageSpec(5, 4, 1, 17)
    model = tiny_model(spec, embedding=NEIGHBOURHOOD, order="any", linear_prediction=True).double()
    embedding = model.embedding
    assert isinstance(embedding, KnownNeighbourhood)
    step = torch.arange(spec.dims)
    for known in itertools.chain.from_iterable(
        itertools.combinations(ADJACENT, count) for count in range(1, 5)
    ):
        visible = torch.zeros(1, 5, 4, dtype=torch.bool)
        image = torch.full((1, 5, 4, 1), 8, dtype=torch.uint8)
        for row, column in known:
            visible[0, 2 + row, 1 + column] = True
            image[0, 2 + row, 1 + column] = 12
        state = model.initial_state(1, visible=visible)
        assert state.canvas is not None
        canvas = state.canvas.taken(model.raster.to_sequence(image, visible), step)
        _, numbers = embedding(canvas, step)
        at = int(canvas.ranks(torch.tensor([[2 * 4 + 1]])))
        # Earlier missing pixels are known too, and grey; those have the number 0.
        pixels = {offset for offset in ADJACENT if offset in known or offset in ADJACENT[:2]}
        weights = {offset: 1 / len(pixels) for offset in pixels}
        if pixels == set(ADJACENT[:2]):
            weights = {(0, -1): 0.8, (-1, 0): 0.6}
        expected = sum(weights[offset] * 0.5 for offset in known)
        assert model.prediction is not None
        assert model.prediction(numbers)[0, at, 0].item() == pytest.approx(expected, abs=1e-6)


def _mechanisms() -> Iterator[Any]:
    for path in sorted((PROJECT_ROOT / "conf" / "attention").glob("*.yaml")):
        yield pytest.param(yaml.safe_load(path.read_text()), id=path.stem)


@torch.no_grad()
@pytest.mark.parametrize("head", [MIXTURE, CATEGORICAL], ids=["mixture", "categorical"])
@pytest.mark.parametrize("attention", list(_mechanisms()))
def test_every_mechanism_that_needs_no_raster(
    attention: dict[str, Any], head: dict[str, Any]
) -> None:
    options = {"attention": attention, "head": head, "linear_prediction": True}
    if get_class(attention["_target_"]).needs_raster:
        with pytest.raises(UserError, match=r"which model\.order=any does not keep"):
            any_model(GREY, **options)
        return
    model = any_model(GREY, n_layers=3, **options)
    visible = region("scattered", GREY)
    sequence = model.raster.to_sequence(images_of(GREY), visible)
    expected = model.parameters_of(sequence, visible=visible)
    found = stepped(model, sequence, visible)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_what_is_hidden_is_counted() -> None:
    model = any_model(COLOUR, tokens="pixel")
    images = images_of(COLOUR)
    visible = region("left", COLOUR)
    visible[1] = False
    sequence = model.raster.to_sequence(images, visible)
    log_prob = model.head.log_prob(model.parameters_of(sequence, visible=visible), sequence)
    assert torch.equal(model.log_prob(images, visible=visible), log_prob)
    # A third of the columns is visible: four pixels.
    expected = [-log_prob[0, 4:].sum() / 24, -log_prob[1].sum() / 36]
    bits = model.bits_per_dim(images, visible=visible)
    torch.testing.assert_close(bits, torch.stack(expected) / math.log(2))
    plain = model.bits_per_dim(images)
    torch.testing.assert_close(plain[1], bits[1])
    nothing = torch.zeros_like(visible)
    torch.testing.assert_close(model.bits_per_dim(images, visible=nothing), plain)


TOY = ImageSpec(3, 3, 1, 3)


@torch.no_grad()
@pytest.mark.parametrize("head", [MIXTURE, CATEGORICAL], ids=["mixture", "categorical"])
def test_the_chain_of_every_region_sums_to_one(head: dict[str, Any]) -> None:
    """All 19,683 images of three levels, for what is visible of one of them."""
    model = any_model(TOY, head=head, n_layers=1, linear_prediction=True)
    images = torch.tensor(list(itertools.product(range(3), repeat=9)), dtype=torch.uint8)
    images = images.view(-1, 3, 3, 1)
    for pattern in ("000000000", "111000000", "000000110", "010101010", "111101111"):
        visible = torch.tensor([bit == "1" for bit in pattern]).view(1, 3, 3)
        kept = visible.view(-1)
        given = torch.tensor([2, 0, 1, 1, 0, 2, 2, 1, 0], dtype=torch.uint8)
        alike = (images.view(-1, 9)[:, kept] == given[kept]).all(dim=1)
        own = images[alike]
        log_prob = model.log_prob(own, visible=visible.expand(len(own), -1, -1))
        total = log_prob[:, int(kept.sum()) :].sum(dim=(1, 2)).exp().sum().item()
        assert len(own) == 3 ** int((~kept).sum())
        assert total == pytest.approx(1, abs=1e-9)


def test_a_checkpoint_keeps_the_order(tmp_path: Any) -> None:
    options = {
        "embedding": NEIGHBOURHOOD,
        "order": "any",
        "whole_images": 0.5,
        "linear_prediction": True,
    }
    path = save_tiny_checkpoint(tmp_path / "any.ckpt", **options)
    model = load_checkpoint(path).model
    assert (model.order, model.whole_images) == ("any", 0.5)
    images, visible = images_of(model.spec), region("left", model.spec)
    expected = tiny_model(model.spec, **options).bits_per_dim(images, visible=visible)
    assert torch.equal(model.bits_per_dim(images, visible=visible), expected)
    # Checkpoints of before do not say; they know the order of the raster.
    assert load_checkpoint(save_tiny_checkpoint(tmp_path / "raster.ckpt")).model.order == "raster"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"order": "spiral"}, "model.order=spiral is unknown; choose one of raster, any."),
        (
            {"embedding": {"_target_": "imagegen.model.embeddings.ValueAndSinusoid"}},
            "needs an embedding that sees neighbours, but model.embedding is ValueAndSinusoid",
        ),
        ({"convolution": [1, 1]}, "model.convolution looks for neighbouring pixels"),
        (
            {"attention": {"_target_": "imagegen.attention.local.LocalAttention"}},
            "attention LocalAttention looks for neighbouring pixels",
        ),
        ({"whole_images": 1.5}, "model.whole_images=1.5 must be between 0 and 1."),
        (
            {"embedding": {**NEIGHBOURHOOD, "neighbours": [[1, 0]]}},
            "of a pixel before the predicted one",
        ),
    ],
)
def test_impossible_models_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        any_model(GREY, **options)


def test_a_model_of_the_raster_takes_no_region() -> None:
    model = tiny_model(GREY)
    visible = region("left", GREY)
    with pytest.raises(UserError, match="knows the order of the raster only"):
        model.initial_state(2, visible=visible)
    with pytest.raises(UserError, match="knows the order of the raster only"):
        model.log_prob(images_of(GREY), visible=visible)
