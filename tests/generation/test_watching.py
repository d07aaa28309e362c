"""Images are watched while they are drawn: the same images, and an exception stops them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from imagegen.core import machine
from imagegen.core.spec import ImageSpec
from imagegen.data.regions import read_region
from imagegen.generation import decode, sampling_loop, watching
from imagegen.generation.decode.graph import GraphDecoder
from imagegen.generation.sampling_loop import complete, draw_images, generate
from imagegen.generation.sampling_request import SamplingRequest
from imagegen.generation.watching import Growth, Snapshot
from imagegen.heads.controls import Controls
from imagegen.model.transformer import ImageTransformer
from tests.helpers import tiny_model

NEIGHBOURHOOD = {"_target_": "imagegen.model.embeddings.Neighbourhood"}
MODELS: dict[str, tuple[ImageSpec, dict[str, Any]]] = {
    "raster": (ImageSpec(9, 7, 1, 17), {}),
    "sub-pixels": (ImageSpec(5, 4, 3), {"embedding": NEIGHBOURHOOD}),
    "orientations": (ImageSpec(6, 6, 1, 17), {"embedding": NEIGHBOURHOOD, "orders": 8}),
    "any order": (
        ImageSpec(6, 5, 3),
        {"embedding": NEIGHBOURHOOD, "order": "any", "tokens": "pixel", "n_classes": 3},
    ),
}
LOOPS = ("torch", "compiled", "graph")


class Stop(Exception):
    pass


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> ImageTransformer:
    spec, options = MODELS[request.param]
    return tiny_model(spec, **options)


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What draws; snapshots are taken whenever they can be."""
    monkeypatch.setattr(watching, "PICTURES", 1e9)
    monkeypatch.setattr(watching, "SHARE", 1e9)
    monkeypatch.setattr(decode, "SHORTEST", 1 << 30 if request.param == "torch" else 1)
    monkeypatch.setattr(decode, "PIECE", 0.0)
    if request.param == "graph":
        monkeypatch.setattr(decode, "_decoder", lambda model, *_: GraphDecoder(model, False))
    return str(request.param)


def _labels(model: ImageTransformer) -> list[int] | None:
    return None if model.n_classes is None else [0, 2, -1]


def _all(model: ImageTransformer, n: int, **options: Any) -> np.ndarray:
    return np.concatenate(list(generate(model, n, seed=3, labels=_labels(model), **options)))


def _check(seen: list[Snapshot], final: Callable[[tuple[int, int]], np.ndarray]) -> None:
    """Snapshots agree with what was drawn in the end, and know more and more."""
    before: dict[tuple[int, int], np.ndarray] = {}
    for shot in seen:
        assert shot.levels.shape[:3] == shot.known.shape
        assert len(shot.which) == len(shot.known)
        for which, levels, known in zip(shot.which, shot.levels, shot.known, strict=True):
            assert np.array_equal(levels[known], final(which)[known])
            assert (known >= before.get(which, np.zeros_like(known))).all()
            before[which] = known
    assert any(0 < shot.known.mean() < 1 for shot in seen)


def test_samples_grow_into_the_same_images(model: ImageTransformer, loop: str) -> None:
    seen: list[Snapshot] = []
    expected = _all(model, 7, batch_size=4)
    assert np.array_equal(_all(model, 7, batch_size=4, watch=seen.append), expected)
    _check(seen, lambda which: expected[which[0]])
    assert {shot.which for shot in seen} == {
        ((0, 0), (1, 0), (2, 0), (3, 0)),
        ((4, 0), (5, 0), (6, 0)),
    }
    # The first pixels come long before the last.
    assert len(seen) > 4


def test_completions_grow_into_the_same_images(model: ImageTransformer, loop: str) -> None:
    images, spec = _all(model, 2), model.spec
    # What no raster of one orientation begins with, where the model knows more.
    word = "right:0.5" if model.order == "any" or model.orders > 1 else "top:0.5"
    visible = np.stack([read_region(word).visible(spec.height, spec.width)] * 2)
    options: dict[str, Any] = {"seed": 5, "labels": _labels(model)}
    seen: list[Snapshot] = []
    expected = complete(model, images, visible, 3, **options)
    assert np.array_equal(
        complete(model, images, visible, 3, watch=seen.append, **options), expected
    )
    _check(seen, lambda which: expected[which])
    assert all(shot.known[:, visible[0]].all() for shot in seen)
    assert {which for shot in seen for which in shot.which} == {
        (image, fork) for image in range(2) for fork in range(3)
    }


@pytest.mark.parametrize("told", ["watch", "progress"])
def test_an_exception_stops_the_drawing(
    model: ImageTransformer, loop: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: 3)
    monkeypatch.setattr(sampling_loop, "DEFAULT_BATCH", 64)
    before, calls = threading.active_count(), 0

    def stop(_: object) -> None:
        nonlocal calls
        calls += 1
        if calls >= 3:
            raise Stop

    with pytest.raises(Stop):
        _all(model, 40, **{told: stop})
    assert threading.active_count() == before
    # Other teams may be about to tell when the first one stops.
    assert calls <= 6
    assert len(_all(model, 1)) == 1  # nothing is left behind


@pytest.mark.parametrize("name", ["raster", "sub-pixels", "orientations"])
def test_particles_are_seen_on_their_way(name: str, loop: str) -> None:
    """As they would be chosen then: drawn pixels may change, visible ones never do."""
    spec, made = MODELS[name]
    model = tiny_model(spec, **made)
    images = _all(model, 2)
    visible = np.stack([read_region("hole:0.5").visible(spec.height, spec.width)] * 2)
    options: dict[str, Any] = {"seed": 5, "particles": 4}
    expected = complete(model, images, visible, 3, **options)
    seen: list[Snapshot] = []
    assert np.array_equal(
        complete(model, images, visible, 3, watch=seen.append, **options), expected
    )
    for image in range(2):
        of_one = [shot for shot in seen if shot.which == tuple((image, fork) for fork in range(3))]
        known = np.stack([shot.known for shot in of_one])
        assert known[:, :, visible[image]].all()
        assert (np.diff(known.astype(int), axis=0) >= 0).all()
        assert 0 < known[0].mean() < 1
        for shot in of_one:
            assert (shot.levels[:, visible[image]] == images[image, visible[image]]).all()
            assert not shot.levels[~shot.known].any()
        assert of_one[-1].known.all()
        assert np.array_equal(of_one[-1].levels, expected[image])
    assert len(seen) > 8


def test_particles_are_stopped_by_their_progress() -> None:
    model = tiny_model(ImageSpec(6, 5))
    visible = read_region("bottom:0.5").visible(6, 5)[None]

    def stop(_: float) -> None:
        raise Stop

    with pytest.raises(Stop):
        complete(model, np.zeros((1, 6, 5, 1), np.uint8), visible, 2, particles=4, progress=stop)


def test_pictures_are_taken_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many a second, and where one takes long, so many fewer."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    model = tiny_model(ImageSpec(8, 8))
    taken: list[float] = []
    cost = 0.001

    def watch(_: Snapshot) -> None:
        nonlocal now
        taken.append(now)
        now += cost

    def run(seconds: float) -> int:
        nonlocal now
        taken.clear()
        growth = Growth(
            None, watch, [(0, 0)], 0, model.raster, lambda: np.zeros((1, 64, 1), np.uint8)
        )
        stop = now + seconds
        while now < stop:
            growth(slice(None), 1)
            now += 0.001
        return len(taken)

    assert 10 <= run(1.0) <= watching.PICTURES + 1
    cost = 0.1
    assert run(12.0) * cost <= 12.0 / 10


def test_nobody_is_told_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Growth, "__init__", refuse)
    model = tiny_model(ImageSpec(3, 3))
    request = SamplingRequest.of(model, 0, Controls(), None, None)
    assert len(next(iter(draw_images(model, range(2), request)))) == 2
