from __future__ import annotations

import numpy as np
import pytest
import torch

from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.regions import read_region
from imagegen.generation.random_numbers import uniforms
from imagegen.generation.sampling_loop import complete, generate
from imagegen.heads.controls import Controls
from imagegen.model.transformer import ImageTransformer
from tests.helpers import tiny_model

SPEC = ImageSpec(6, 5, 3)


@pytest.fixture(scope="module", params=["linear", "softmax", "pixel tokens"])
def model(request: pytest.FixtureRequest) -> ImageTransformer:
    softmax = request.param == "softmax"
    attention = "softmax.SoftmaxAttention" if softmax else "linear.LinearAttention"
    model = tiny_model(
        SPEC,
        attention={"_target_": f"imagegen.attention.{attention}"},
        tokens="pixel" if request.param == "pixel tokens" else "subpixel",
        embedding={"_target_": "imagegen.model.embeddings.Neighbourhood"},
        n_layers=2,
        dropout=0.5,
    )
    return model.train()


def _all(*args: object, **kwargs: object) -> np.ndarray:
    return np.concatenate(list(generate(*args, **kwargs)))  # type: ignore[arg-type]


def test_an_image_does_not_depend_on_its_company(model: ImageTransformer) -> None:
    expected = _all(model, 40, seed=3)
    assert expected.shape == (40, *SPEC.shape)
    assert expected.dtype == np.uint8
    for n, batch_size in ((1, 1), (3, 2), (40, 7), (17, 17), (39, 100)):
        assert np.array_equal(_all(model, n, seed=3, batch_size=batch_size), expected[:n])
    assert np.array_equal(_all(model, 5, seed=3, start=20), expected[20:25])
    assert not np.array_equal(_all(model, 5, seed=4), expected[:5])
    assert len(np.unique(expected.reshape(40, -1), axis=0)) == 40


def test_the_model_is_left_as_it_was(model: ImageTransformer) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _all(model, 2)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_completions_keep_what_is_visible_and_differ(model: ImageTransformer) -> None:
    images = _all(model, 5, seed=1)
    rows = [3, 3, 0, 5, 6]
    drawn = complete(model, images, rows, completions=4, seed=9)
    assert drawn.shape == (5, 4, *SPEC.shape)
    for image, visible, continuations in zip(images, rows, drawn, strict=True):
        kept = np.repeat(image[None, :visible], 4, axis=0)
        assert np.array_equal(continuations[:, :visible], kept)
        different = len(np.unique(continuations.reshape(4, -1), axis=0))
        assert different == (1 if visible == 6 else 4)


def test_a_completion_does_not_depend_on_its_company(model: ImageTransformer) -> None:
    images = _all(model, 5, seed=1)
    expected = complete(model, images, [2] * 5, completions=5, seed=9)
    for batch_size in (1, 3, 4, 11):
        drawn = complete(model, images, [2] * 5, completions=5, seed=9, batch_size=batch_size)
        assert np.array_equal(drawn, expected)
    fewer = complete(model, images[:2], [2, 2], completions=1, seed=9)
    assert np.array_equal(fewer, expected[:2, :1])
    mixed = complete(model, images, [1, 2, 3, 2, 2], completions=2, seed=9)
    assert np.array_equal(mixed[[1, 3, 4]], expected[[1, 3, 4], :2])


REGIONS = ["left:0.5", "hole:0.4", "rectangle:[1,1,2,2]", "top:0.5", "random:0.3"]


def _regions(words: list[str]) -> np.ndarray:
    height, width, _ = SPEC.shape
    return np.stack([read_region(w).visible(height, width, 0, i) for i, w in enumerate(words)])


def test_a_completion_of_a_region_keeps_it_whatever_its_company(model: ImageTransformer) -> None:
    images, visible = _all(model, 5, seed=1), _regions(REGIONS)
    options = {"seed": 9, "particles": 12}
    expected = complete(model, images, visible, 4, **options)
    for image, kept, drawn in zip(images, visible, expected, strict=True):
        assert (drawn[:, kept] == image[kept]).all()
        assert (drawn[:, ~kept] != image[~kept]).any()
    for batch_size in (1, 3):
        again = complete(model, images, visible, 4, batch_size=batch_size, **options)
        assert np.array_equal(again, expected)
    fewer = complete(model, images[:3], visible[:3], 2, **options)
    assert np.array_equal(fewer, expected[:3, :2])
    # What is hidden does not matter.
    unknown = np.where(visible[..., None], images, 255 - images)
    assert np.array_equal(complete(model, unknown, visible, 4, **options), expected)
    # Other particles are other images.
    more = complete(model, images, visible, 4, seed=9, particles=13)
    assert np.array_equal(more[3], expected[3])
    assert not np.array_equal(more[0], expected[0])


def test_a_visible_part_may_end_within_a_row(model: ImageTransformer) -> None:
    samples = _all(model, 3, seed=5)
    visible = np.zeros((3, *SPEC.shape[:2]), dtype=bool)
    visible[:, :2] = visible[1, 2, :3] = visible[2, 2, :1] = True
    reports: list[int] = []
    drawn = complete(
        model, samples, visible, 1, seed=5, report=lambda image, _: reports.append(image)
    )
    # With its own numbers a sample is completed to itself, without particles.
    assert np.array_equal(drawn[:, 0], samples)
    assert not reports


def test_a_completion_of_nothing_is_a_sample(model: ImageTransformer) -> None:
    drawn = complete(model, np.zeros((3, *SPEC.shape), np.uint8), [0, 0, 0], 1, seed=5)
    assert np.array_equal(drawn[:, 0], _all(model, 3, seed=5))


def test_completing_a_sample_with_its_own_numbers_gives_it_back(model: ImageTransformer) -> None:
    samples = _all(model, 3, seed=5)
    assert np.array_equal(complete(model, samples, [3, 3, 3], 1, seed=5)[:, 0], samples)


def test_greedy_needs_no_chance(model: ImageTransformer) -> None:
    images = _all(model, 3, seed=0, controls=Controls(temperature=0.0))
    assert np.array_equal(images[0], images[1])
    assert np.array_equal(images, _all(model, 3, seed=1, controls=Controls(temperature=0.0)))


def test_progress_adds_up(model: ImageTransformer) -> None:
    done: list[float] = []
    _all(model, 21, batch_size=10, progress=done.append)
    assert sum(done) == pytest.approx(21)
    done.clear()
    complete(model, np.zeros((4, *SPEC.shape), np.uint8), [1, 2, 6, 1], 3, progress=done.append)
    assert sum(done) == pytest.approx(12)
    done.clear()
    visible = _regions(REGIONS[:2])
    zeros = np.zeros((2, *SPEC.shape), np.uint8)
    complete(model, zeros, visible, 3, particles=4, progress=done.append)
    assert sum(done) == pytest.approx(6)


def test_uniform_numbers_are_uniform_and_independent() -> None:
    numbers = np.stack([uniforms(0, image, stream, 500) for image in range(9) for stream in (0, 1)])
    assert 0 < numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    correlation = np.corrcoef(numbers) - np.eye(len(numbers))
    assert np.abs(correlation).max() < 0.25
    assert np.array_equal(uniforms(7, 3, 1, 10), uniforms(7, 3, 1, 20)[:10])
    assert not np.array_equal(uniforms(2**64 - 1, 3, 1, 10), uniforms(2**64 - 2, 3, 1, 10))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n": 0}, "n=0 must be at least 1"),
        ({"n": 1, "seed": -1}, "seed=-1"),
        ({"n": 1, "seed": 2**64}, "seed="),
        ({"n": 1, "labels": [0]}, "this model was trained without labels"),
        ({"n": 1, "controls": Controls(guidance=2.0)}, "guidance=2.0 needs labels"),
        ({"n": 1, "batch_size": 0}, "batch_size=0"),
        ({"n": 1, "start": -1}, "start=-1"),
    ],
)
def test_numbers_out_of_range_are_refused_at_once(options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        generate(tiny_model(SPEC), **options)


def test_impossible_completions_are_refused() -> None:
    model, images = tiny_model(SPEC), np.zeros((2, *SPEC.shape), np.uint8)
    with pytest.raises(UserError, match="1 of 2 images"):
        complete(model, images, [1], 1)
    with pytest.raises(UserError, match="visible_rows=7 must be between 0 and the height, 6"):
        complete(model, images, [1, 7], 1)
    with pytest.raises(UserError, match="particles=0 must be at least 1"):
        complete(model, images, [1, 1], 1, particles=0)
    with pytest.raises(UserError, match="completions=0"):
        complete(model, images, [1, 1], 0)


@pytest.fixture(scope="module")
def conditional() -> ImageTransformer:
    model = tiny_model(SPEC, tokens="pixel", n_classes=3)
    with torch.no_grad():
        # Labels have to matter more than those of an untrained model do.
        model.label.weight.mul_(8)  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_labels_belong_to_images(conditional: ImageTransformer, guidance: float) -> None:
    options = {"seed": 3, "controls": Controls(guidance=guidance)}
    expected = _all(conditional, 40, labels=[2, 0], **options)
    for n, batch_size in ((1, 1), (3, 2), (40, 7), (39, 100)):
        drawn = _all(conditional, n, labels=[2, 0], batch_size=batch_size, **options)
        assert np.array_equal(drawn, expected[:n])
    twos = _all(conditional, 40, labels=[2], **options)
    assert np.array_equal(twos[::2], expected[::2])
    assert not np.array_equal(twos[1::2], expected[1::2])


def test_guidance_of_one_is_the_conditional_model(conditional: ImageTransformer) -> None:
    plain = _all(conditional, 5, labels=[1])
    guided = _all(conditional, 5, labels=[1], controls=Controls(guidance=4.0))
    assert not np.array_equal(plain, guided)
    # Without a label, guidance has nothing to add, so only the way of drawing differs.
    nothing = _all(conditional, 200, labels=[-1], controls=Controls(guidance=4.0))
    same = _all(conditional, 200, labels=[-1])
    assert abs(nothing.mean() - same.mean()) < 5
    assert np.array_equal(same, _all(conditional, 200))


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_completions_have_labels(conditional: ImageTransformer, guidance: float) -> None:
    options = {"seed": 9, "controls": Controls(guidance=guidance), "labels": [0, 2]}
    images = _all(conditional, 4, seed=1)
    drawn = complete(conditional, images, [2, 2, 3, 0], completions=3, **options)
    assert np.array_equal(drawn[:, 0, :2][:3], images[:3, :2])
    again = complete(conditional, images, [2, 2, 3, 0], completions=3, batch_size=2, **options)
    assert np.array_equal(drawn, again)
    visible = _regions(REGIONS[:2])
    by_particles = complete(conditional, images[:2], visible, 2, particles=8, **options)
    assert np.array_equal(
        by_particles, complete(conditional, images[:2], visible, 2, particles=8, **options)
    )
    others = {**options, "labels": [1]}
    assert not np.array_equal(
        by_particles, complete(conditional, images[:2], visible, 2, particles=8, **others)
    )
    # A completion of nothing is a sample of the image's label.
    assert np.array_equal(drawn[3, 0], _all(conditional, 4, **options)[3])


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([3], "label=3 is unknown; the model has labels 0 to 2"),
        ([-2], "label=-2"),
        ([], "is empty"),
    ],
)
def test_unknown_labels_are_refused(
    conditional: ImageTransformer, labels: list[int], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        generate(conditional, 1, labels=labels)
