"""Compiled generation draws what PyTorch's operations draw, whatever is drawn beside an image."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from imagegen.core import machine
from imagegen.core.machine import Choice
from imagegen.core.spec import ImageSpec
from imagegen.data.regions import read_region
from imagegen.generation import decode, particles
from imagegen.generation.decode import bf16, choose_decoder, fused, parameters_as_drawn
from imagegen.generation.decode.embedding import (
    condition_of,
    condition_tables,
    embed,
    order_of,
    tables_of,
)
from imagegen.generation.decode.fused import FusedDecoder
from imagegen.generation.decode.matmul import TILE_ROWS
from imagegen.generation.decode.matrix import BF16
from imagegen.generation.decode.prepare import why_not
from imagegen.generation.decode.sampling import draw_categorical
from imagegen.generation.sampling_loop import complete, generate
from imagegen.heads.categorical import Categorical
from imagegen.heads.controls import Controls, nucleus, tempered
from imagegen.model.transformer import ImageTransformer
from tests.helpers import tiny_model

NEIGHBOURHOOD = {"_target_": "imagegen.model.embeddings.Neighbourhood"}
CATEGORICAL = {"_target_": "imagegen.heads.categorical.Categorical"}
SOFTMAX_TOO = {
    "_target_": "imagegen.heads.mixture_of_logistics.MixtureOfLogistics",
    "n_mixtures": 4,
    "categorical": True,
}


def _attention(name: str, **options: Any) -> dict[str, Any]:
    return {"_target_": f"imagegen.attention.{name}", **options}


RELU = _attention("linear.LinearAttention", feature_map="relu")
MODELS: dict[str, tuple[ImageSpec, dict[str, Any]]] = {
    "paper": (ImageSpec(9, 7), {"norm_first": False, "activation": "relu", "n_layers": 2}),
    "default": (
        ImageSpec(9, 7, 1, 17),
        {"embedding": NEIGHBOURHOOD, "n_layers": 2, "linear_prediction": True, "head": SOFTMAX_TOO},
    ),
    "sub-pixels": (ImageSpec(5, 4, 3), {"embedding": NEIGHBOURHOOD}),
    "pixels": (
        ImageSpec(6, 5, 3),
        {
            "embedding": NEIGHBOURHOOD,
            "tokens": "pixel",
            "linear_prediction": True,
            "n_classes": 3,
            "label_grid": 4,
            "flips": True,
            "norm": "rms",
            "gated": True,
            "activation": "silu",
            "residual_scale": 0.5,
            "head": SOFTMAX_TOO,
        },
    ),
    "any order": (
        ImageSpec(6, 5, 3),
        {
            "embedding": NEIGHBOURHOOD,
            "order": "any",
            "tokens": "pixel",
            "linear_prediction": True,
            "n_classes": 3,
            "label_grid": 4,
            "n_layers": 2,
        },
    ),
    "any order, sub-pixels": (
        ImageSpec(5, 4, 3, 17),
        {
            "embedding": NEIGHBOURHOOD,
            "order": "any",
            "linear_prediction": True,
            "head": SOFTMAX_TOO,
        },
    ),
    "categorical": (ImageSpec(6, 5, 1, 17), {"head": CATEGORICAL, "attention": RELU}),
    "retention": (ImageSpec(6, 5, 1, 17), {"attention": _attention("retention.Retention")}),
    "gla": (
        ImageSpec(6, 5, 1, 17),
        {"attention": _attention("gla.GatedLinearAttention", gate_temperature=2.0)},
    ),
    "delta": (ImageSpec(6, 5, 1, 17), {"attention": _attention("delta.DeltaNet"), "n_layers": 2}),
    "gated_delta": (
        ImageSpec(6, 5, 1, 17),
        {"attention": _attention("gated_delta.GatedDeltaNet"), "head_dim": 6},
    ),
    "gated_delta by channel": (
        ImageSpec(6, 5, 1, 17),
        {"attention": _attention("gated_delta.GatedDeltaNet", gate="channel", conv_size=0)},
    ),
    # Keys are read in 32 columns at once, then in 8.
    "softmax": (ImageSpec(7, 5, 1, 17), {"attention": _attention("softmax.SoftmaxAttention")}),
    "plain sub-pixels": (ImageSpec(5, 4, 3), {"tokens": "pixel", "head_dim": 5}),
}

# Areas of different sizes, which turning does not map onto each other.
TURNED = {**MODELS["pixels"][1], "flips": False, "orders": 8}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ImageTransformer:
    spec, options = MODELS[request.param]
    monkeypatch.setattr(decode, "SHORTEST", 1)
    return tiny_model(spec, **options)


def _all(*args: object, **kwargs: object) -> np.ndarray:
    return np.concatenate(list(generate(*args, **kwargs)))  # type: ignore[arg-type]


def _labels(model: ImageTransformer) -> list[int] | None:
    return None if model.n_classes is None else [0, 2, -1]


CONTROLS = [
    Controls(),
    Controls(temperature=0.6),
    Controls(mixture_temperature=0.0, scale_temperature=0.5),
    Controls(temperature=1.2, top_p=0.6),
]


@pytest.mark.parametrize("controls", CONTROLS, ids=["plain", "cool", "parts", "top_p"])
def test_the_same_images(
    model: ImageTransformer, controls: Controls, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "Categorical" in type(model.head).__name__ and controls.mixture_temperature is not None:
        pytest.skip("categorical heads have one temperature")
    options: dict[str, Any] = {"seed": 3, "controls": controls, "labels": _labels(model)}
    options["precision"] = "32"
    assert choose_decoder(model, controls) is not None
    compiled = _all(model, 30, **options)
    visible = [2, 3, 0] * 4
    completed = complete(model, compiled[:12], visible, 2, **options)
    monkeypatch.setattr(decode, "SHORTEST", 1 << 30)
    plain = _all(model, 30, **options)
    # A number may be rounded to the neighbouring level, and the rest of an image then differs.
    alike = (compiled == plain).reshape(30, -1).all(axis=1)
    assert alike.mean() >= 0.9
    alike = (completed == complete(model, compiled[:12], visible, 2, **options)).reshape(24, -1)
    assert alike.all(axis=1).mean() >= 0.9


GUIDED = {
    "raster": {"orders": 8, "attention": RELU},
    "any order": {"order": "any"},
}


def _labelled(**options: Any) -> ImageTransformer:
    shape = {"head": CATEGORICAL, "embedding": NEIGHBOURHOOD, "n_classes": 3, "label_grid": 4}
    return tiny_model(ImageSpec(6, 6, 1, 17), **shape, **options)


GUIDING = [Controls(guidance=3.0, temperature=0.8), Controls(guidance=3.0, top_p=0.7)]


@pytest.mark.parametrize("controls", GUIDING, ids=["cool", "top_p"])
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("kind", GUIDED)
def test_guided_images_are_the_same(
    kind: str, members: int, controls: Controls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "SHORTEST", 1)
    monkeypatch.setattr(fused, "MICRO_BATCH", 16)
    monkeypatch.setattr(fused, "_teams", lambda *_: (3 - members, members))
    model = _labelled(n_layers=2, **GUIDED[kind])
    options: dict[str, Any] = {"seed": 3, "controls": controls, "labels": [0, 2, -1]}
    assert isinstance(choose_decoder(model, controls), FusedDecoder)
    compiled = _all(model, 30, precision="32", **options)
    unguided = _all(model, 30, precision="32", **{**options, "controls": Controls()})
    assert (compiled != unguided).reshape(30, -1).any(axis=1).mean() > 0.5
    done: list[float] = []
    for number in (1, 5, 30):
        few = _all(model, number, precision="32", batch_size=7, progress=done.append, **options)
        assert np.array_equal(few, compiled[:number])
    assert sum(done) == pytest.approx(36)
    visible = [2, 3, 0] * 4
    completed = complete(model, compiled[:12], visible, 2, precision="32", **options)
    monkeypatch.setattr(decode, "SHORTEST", 1 << 30)
    alike = (compiled == _all(model, 30, **options)).reshape(30, -1).all(axis=1)
    assert alike.mean() >= 0.9
    alike = (completed == complete(model, compiled[:12], visible, 2, **options)).reshape(24, -1)
    assert alike.all(axis=1).mean() >= 0.9


@pytest.mark.parametrize("precision", ["32", "int16", "int8", "bf16"])
def test_guidance_of_zero_ignores_the_label(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with and without labels go through the same products, whatever their numbers."""
    if precision == "bf16":
        _needs_bf16()
    monkeypatch.setattr(decode, "SHORTEST", 1)
    model = _labelled()
    options: dict[str, Any] = {"seed": 3, "precision": precision, "batch_size": 70}
    controls = Controls(guidance=0.0, top_p=0.9)
    without = _all(model, 70, labels=[0, 2], controls=controls, **options)
    assert choose_decoder(model, controls, precision).precision == precision  # type: ignore[union-attr]
    unlabelled = Controls(top_p=0.9)
    assert np.array_equal(without, _all(model, 70, labels=[-1], controls=unlabelled, **options))
    labelled = _all(model, 70, labels=[0, 2], controls=unlabelled, **options)
    assert (without != labelled).reshape(70, -1).any(axis=1).mean() > 0.5


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_the_most_probable_levels_are_the_same(
    guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "SHORTEST", 1)
    model = _labelled()
    controls = Controls(temperature=0.0, guidance=guidance)
    assert isinstance(choose_decoder(model, controls), FusedDecoder)
    options: dict[str, Any] = {"controls": controls, "labels": [0, 1, 2, -1], "precision": "32"}
    compiled = _all(model, 4, **options)
    assert np.array_equal(compiled, _all(model, 4, seed=9, **options))
    monkeypatch.setattr(decode, "SHORTEST", 1 << 30)
    assert np.array_equal(compiled, _all(model, 4, **options))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1 - 1e-9, 1.0])
def test_the_same_choices(top_p: float, temperature: float) -> None:
    """Of peaked and of flat distributions, of equal logits, and at both ends of chance."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(400, 33, generator=generator) * torch.logspace(-1, 2, 400)[:, None]
    logits[:50] = logits[:50].round()
    logits[50:60, 1:] = -1e5
    uniforms = torch.rand(400, 1, generator=generator, dtype=torch.float64)
    uniforms[::7], uniforms[1::7] = np.nextafter(0.0, 1.0), np.nextafter(1.0, 0.0)
    head = Categorical(8, 33)
    expected = head.sample(logits, uniforms, Controls(temperature=temperature, top_p=top_p))
    drawn = np.zeros((400, 1), dtype=np.uint8)
    work = np.zeros(33)
    draw_categorical(
        logits.numpy(), uniforms.numpy(), temperature, top_p, work, drawn, 0, len(drawn)
    )
    same = drawn[:, 0] == expected[:, 0].numpy()
    assert same.mean() > 0.99  # the rest is rounded to the neighbour
    kept = nucleus(tempered(logits.double(), temperature), min(top_p + 1e-9, 1.0))
    assert kept.gather(-1, torch.from_numpy(drawn).long()).isfinite().all()


def test_the_same_particles(model: ImageTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    images, (height, width, _) = _all(model, 4, seed=3, precision="32"), model.spec.shape
    words = ("left:0.5", "hole:0.5", "random:0.4", "bottom:0.5")
    visible = np.stack([read_region(w).visible(height, width, 0, i) for i, w in enumerate(words)])
    monkeypatch.setattr(particles, "RESAMPLED", 0.9)
    found: list[tuple[np.ndarray, list[float]]] = []
    for shortest in (1, 1 << 30):
        monkeypatch.setattr(decode, "SHORTEST", shortest)
        told: list[float] = []
        drawn = complete(
            model,
            images,
            visible,
            3,
            seed=3,
            labels=_labels(model),
            precision="32",
            particles=14,
            report=lambda _, report, told=told: told.append(report.log_evidence),  # type: ignore[misc]
        )
        found.append((drawn, told))
    (compiled, evidence), (plain, expected) = found
    alike = (compiled == plain).reshape(4, -1).all(axis=1)
    # A level that is rounded otherwise may change what is drawn from then on.
    assert alike.sum() >= 2
    assert (expected == []) == (model.order == "any")
    if expected:
        np.testing.assert_allclose(np.array(evidence)[alike], np.array(expected)[alike], atol=0.05)


def _needs_bf16() -> None:
    if bf16.why_not() is not None:
        pytest.skip("oneDNN has no bfloat16 products here")


@pytest.mark.parametrize("forced", ["0", "1"], ids=["whole numbers", "bf16"])
def test_an_image_does_not_depend_on_its_company(
    model: ImageTransformer, forced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced == "1":
        _needs_bf16()
    monkeypatch.setenv(machine.FORCE_BF16_DRAWING, forced)
    monkeypatch.setattr(fused, "MICRO_BATCH", 12)
    monkeypatch.setattr(fused, "BLOCK", 16)
    monkeypatch.setattr(machine, "usable_cpus", lambda: 3)
    expected = _all(model, 40, seed=3, labels=_labels(model))
    for n, batch_size, threads in ((1, 1, 1), (3, 2, 2), (40, 7, 1), (40, 64, 3)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            drawn = _all(model, n, seed=3, batch_size=batch_size, labels=_labels(model))
        finally:
            torch.set_num_threads(before)
        assert np.array_equal(drawn, expected[:n])
    nothing = complete(
        model, np.zeros_like(expected[:3]), [0, 0, 0], 1, seed=3, labels=_labels(model)
    )
    assert np.array_equal(nothing[:, 0], expected[:3])
    # Told what is kept, a model of any order draws otherwise; bf16 is far from the parallel form.
    if model.order == "any" or forced == "1":
        return
    again = complete(model, expected[:3], [2, 2, 2], 1, seed=3, labels=_labels(model))
    # The parallel form rounds otherwise than the steps; the numbers drawn are the same.
    assert (again[:, 0] == expected[:3]).reshape(3, -1).all(axis=1).mean() >= 0.6


@torch.no_grad()
@pytest.mark.parametrize("bits", [32, BF16, 16, 8])
def test_the_distribution_of_every_step(model: ImageTransformer, bits: int) -> None:
    """Step by step in the decoder's arithmetic against the parallel form in float64."""
    if bits == BF16:
        _needs_bf16()
    decoder = FusedDecoder(model, bits)
    sequence = torch.randint(
        model.spec.levels, (5, model.raster.length, model.raster.values_per_step)
    ).to(torch.uint8)
    if model.n_classes is None:
        labels, known = None, None
    else:
        labels = torch.tensor([0, 1, 2, -1, 1])
        known = labels.numpy()
    drawn = decoder.parameters(sequence.numpy(), known)
    double = copy.deepcopy(model).double().eval()
    expected = double.parameters_of(sequence, labels).numpy()
    error = np.sqrt(((drawn - expected) ** 2).mean() / expected.var())
    assert error < {32: 2e-6, BF16: 3e-2, 16: 2e-3, 8: 3e-2}[bits]
    if bits == 32:
        np.testing.assert_allclose(drawn, expected, atol=3e-5 * np.abs(expected).max())


def test_bf16_draws_what_pytorch_draws(
    model: ImageTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than a block, as far as rounding leaves the values alike; and particles."""
    _needs_bf16()
    monkeypatch.setattr(fused, "BLOCK", 16)
    options: dict[str, Any] = {"seed": 3, "labels": _labels(model)}
    compiled = _all(model, 70, precision="bf16", batch_size=70, **options)
    monkeypatch.setattr(decode, "SHORTEST", 1 << 30)
    plain = _all(model, 70, **options)
    close = np.abs(compiled.astype(int) - plain.astype(int)) <= 1
    assert close[:, 0, 0].mean() >= 0.9
    monkeypatch.setattr(decode, "SHORTEST", 1)
    visible = read_region("left:0.5").visible(*model.spec.shape[:2], 0, 0)[None]
    options |= {"precision": "bf16", "particles": 70}
    completed = complete(model, plain[:1], visible, 2, **options)
    assert (completed[0, :, visible[0]] == plain[0, visible[0]][:, None]).all()


def test_bf16_is_chosen_by_the_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _needs_bf16()
    monkeypatch.setattr(decode, "SHORTEST", 1)
    monkeypatch.setattr(machine, "instruction_sets", lambda: frozenset({"avx2", "amx_bf16"}))
    monkeypatch.setattr(machine, "threads", lambda: Choice("2", "so many"))
    model = tiny_model(ImageSpec(4, 4, 1, 17))

    def precision(batch_size: int) -> str:
        decoder = choose_decoder(model, Controls(), "auto", batch_size)
        assert decoder is not None
        return decoder.precision

    assert precision(255) != "bf16"
    assert precision(256) == "bf16"
    decode.say.cache_clear()
    monkeypatch.setattr(bf16, "why_not", lambda: "this PyTorch has no oneDNN")
    assert precision(256) == precision(256) == precision(255)
    assert capsys.readouterr().err.count("computing without bfloat16: this PyTorch") == 1
    assert choose_decoder(model, Controls(), "bf16") is None


def test_what_a_product_raises_ends_the_drawing() -> None:
    _needs_bf16()
    model = tiny_model(ImageSpec(4, 4, 1, 17))
    decoder = FusedDecoder(model, BF16)
    assert decoder.products is not None
    decoder.products.layers.clear()
    with pytest.raises(KeyError), torch.no_grad():
        decoder.parameters(np.zeros((1, 16, 1), dtype=np.uint8))


def test_an_interrupted_drawing_ends(
    model: ImageTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    def stop(done: float) -> None:
        raise Stop

    monkeypatch.setattr(machine, "usable_cpus", lambda: 3)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(Stop):
            _all(model, 5, progress=stop, labels=_labels(model))
    finally:
        torch.set_num_threads(before)


def test_no_more_threads_than_usable_cpus(
    model: ImageTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as PyTorch announces in a container of two CPUs on a large host."""
    monkeypatch.setattr(machine, "usable_cpus", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert fused._teams(model, 64) == (2, 1)
    assert fused._teams(model, 1) == (1, 2)


def test_micro_batches_are_alike_for_all_teams() -> None:
    for teams in (1, 2, 3, 8):
        for rows in range(1, 500):
            parts = fused._parts(rows, teams, None)
            sizes = [part.stop - part.start for part in parts]
            assert sum(sizes) == rows
            assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
            assert 0 < min(sizes) <= max(sizes) <= fused.MICRO_BATCH
            tiles = math.ceil(rows / TILE_ROWS)
            assert len(parts) % teams == 0 or len(parts) == tiles
            assert max(sizes) - min(sizes[:-1], default=max(sizes)) <= TILE_ROWS
    assert [part.start for part in fused._parts(100, 2, 64)] == [0, 64]


def test_progress_adds_up(model: ImageTransformer) -> None:
    done: list[float] = []
    _all(model, 21, batch_size=10, progress=done.append)
    assert sum(done) == pytest.approx(21)


@torch.no_grad()
@pytest.mark.parametrize("name", [n for n, (_, o) in MODELS.items() if o.get("order") == "any"])
def test_a_region_is_completed_as_pytorch_does(name: str) -> None:
    """From the canvas of a state behind the visible pixels, which differ between the rows."""
    spec, options = MODELS[name]
    model, rows = tiny_model(spec, **options), 12
    assert model.prediction is not None
    torch.nn.init.normal_(model.prediction.weight, std=0.1)
    visible = torch.zeros(rows, spec.height * spec.width, dtype=torch.bool)
    for row in range(rows):
        visible[row, torch.randperm(visible.shape[1], generator=_seeded(row))[:9]] = True
    visible = visible.view(rows, spec.height, spec.width)
    images = torch.randint(0, spec.levels, (rows, *spec.shape), generator=_seeded(99)).byte()
    kept = 9 * model.raster.steps_per_pixel
    prefix = model.raster.to_sequence(images, visible)[:, :kept]
    labels = None if model.n_classes is None else torch.arange(rows) % 3
    initial = model.initial_state(rows, labels, visible)
    parameters, state = model.prefill(prefix, initial)
    count, uniforms = model.raster.length - kept, model.head.uniforms_per_step
    noise = np.random.default_rng(0).random((rows, count, uniforms))
    sequence = np.zeros((rows, model.raster.length, model.raster.values_per_step), dtype=np.uint8)
    FusedDecoder(model, 32).draw(state.clone(), parameters, sequence, noise, Controls())
    expected = [prefix]
    for step in range(count):
        if step:
            parameters, state = model.step(expected[-1][:, -1], state)
        levels = model.head.sample(parameters, torch.from_numpy(noise[:, step]), Controls())
        expected.append(levels.byte().unsqueeze(1))
    plain = torch.cat(expected, dim=1).numpy()
    assert np.array_equal(sequence[:, :kept], prefix.numpy())
    alike = (sequence == plain).reshape(rows, -1).all(axis=1)
    assert alike.mean() >= 0.9
    completed = model.raster.to_images(torch.from_numpy(sequence), visible)
    assert torch.equal(completed[visible], images[visible])


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["paper", "default", "pixels", "plain sub-pixels", "any order, sub-pixels", "turned"]
)
def test_tables_are_the_embedding(name: str) -> None:
    spec, options = {**MODELS, "turned": (ImageSpec(6, 6, 3), TURNED)}[name]
    model = tiny_model(spec, **options)
    images = torch.randint(0, spec.levels, (3, *spec.shape), dtype=torch.uint8)
    sequence = model.raster.to_sequence(images)
    labels, step = torch.tensor([-1, 0, 2]), torch.arange(model.raster.length)
    orientation = torch.tensor([0, 1, 6]) % model.orders
    state = model.initial_state(3, labels, orientation=orientation)
    seen = model._padded(sequence[:, :-1])
    if state.canvas is not None:
        seen = state.canvas.taken(sequence, step)
    expected, _ = model.embedding(seen, step)
    added = model.condition(labels, orientation, step.unsqueeze(0))
    if added is not None:
        expected = expected + added
    tables, order = tables_of(model.embedding), order_of(state.canvas, slice(0, 3), len(step))
    condition, area = condition_tables(model)
    rows = condition_of(model, state, slice(0, 3))
    for position in range(model.raster.length):
        x = np.empty((3, 16), dtype=np.float32)
        embed(
            sequence.numpy(),
            position,
            order,
            tables,
            condition,
            area,
            rows,
            x,
            0,
            3,
        )
        np.testing.assert_allclose(x, expected[:, position], atol=2e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention": _attention("local.LocalAttention", window=3)}, "LocalAttention"),
        ({"attention": _attention("retention.Retention", conv_size=2)}, "conv_size"),
        ({"attention": {**RELU, "feature_map": "favor"}}, "feature map"),
        ({"attention": {**RELU, "qk_norm": True}}, "qk_norm"),
        ({"convolution": [1, 1]}, "convolutions"),
    ],
)
def test_other_models_fall_back_and_say_so_once(
    options: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(decode, "SHORTEST", 1)
    decode.say.cache_clear()
    model = tiny_model(ImageSpec(4, 4, 1, 17), **options)
    assert reason in str(why_not(model))
    with pytest.raises(ValueError, match=reason):
        FusedDecoder(model)
    first, second = _all(model, 2, seed=1), _all(model, 2, seed=1)
    assert np.array_equal(first, second)
    assert capsys.readouterr().err.count("drawing without compiled loops") == 1


def test_what_the_loop_cannot_draw_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SHORTEST", 1)
    model = tiny_model(ImageSpec(4, 4, 1, 17))
    assert choose_decoder(model, Controls()) is not None
    for controls in (Controls(temperature=0.0), Controls(guidance=2.0)):
        assert choose_decoder(model, controls) is None
    assert choose_decoder(model.double(), Controls()) is None
    monkeypatch.setattr(decode, "SHORTEST", 17)
    assert choose_decoder(model.float(), Controls()) is None


def test_where_compiling_fails_pytorch_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def fails(*_: object) -> None:
        raise TypeError("no such type\nand much more")

    model = tiny_model(ImageSpec(4, 4, 1, 17))
    expected = _all(model, 2, seed=1)
    monkeypatch.setattr(decode, "SHORTEST", 1)
    monkeypatch.setattr(fused, "run", fails)
    decode.say.cache_clear()
    for _ in range(2):
        assert np.array_equal(_all(model, 2, seed=1), expected)
    said = capsys.readouterr().err
    assert said.count("drawing without compiled loops") == 1
    assert "(TypeError: no such type)" in said


def test_what_is_compiled_to_score_is_not_said_to_draw(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`imagegen evaluate precision=` computes with the loop that draws, and draws nothing."""
    monkeypatch.setattr("imagegen.core.compiled.cache.first_use", lambda *_: True)
    decode.say.cache_clear()
    parameters_as_drawn(
        tiny_model(ImageSpec(4, 4)), torch.zeros(1, 16, 1, dtype=torch.uint8), None, "int8"
    )
    decode.say.cache_clear()
    said = capsys.readouterr().err
    assert said == "compiling the drawing loop for this machine takes seconds, once\n"


def test_the_first_step_compiles_all_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what cannot be compiled is known before anything is drawn."""
    from imagegen.generation.decode.loop import run

    monkeypatch.setattr(decode, "SHORTEST", 1)
    model = tiny_model(ImageSpec(6, 5, 1, 17))
    assert choose_decoder(model, Controls()) is not None
    before = set(run.signatures)
    assert before
    _all(model, 7, seed=1, batch_size=3, controls=Controls(temperature=0.7))
    complete(model, _all(model, 2, seed=1), [2, 3], 2, seed=1)
    assert set(run.signatures) == before
