"""Every way that a model is used, run on the CPU and on a simulated device, and compared.

The models are those of `tests.devices.cases`. The ways are the functions below that are marked.
Those that run the code of a mechanism are taken with every mechanism, and a head in turn; the
others see of a mechanism no more than its steps and are taken with every head, for one mechanism
whose state keeps its size and for one whose state grows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pytorch_lightning import Trainer
from torch import Tensor

from imagegen.core.errors import UserError
from imagegen.data.base import ImageSplit
from imagegen.evaluation.checks import all_checks
from imagegen.evaluation.coding import decode as decode_images
from imagegen.evaluation.coding import encode
from imagegen.evaluation.hidden import score_hidden
from imagegen.evaluation.scores import classify_images, score_images
from imagegen.evaluation.surprise import bits_of_pixels, distribution_at, likeliest
from imagegen.generation import decode
from imagegen.generation.decode import graph
from imagegen.generation.sampling_loop import complete, generate
from imagegen.heads.controls import Controls
from imagegen.model.orientations import turn
from imagegen.model.transformer import ImageTransformer
from imagegen.training.callbacks import Grids
from imagegen.training.module import ImageModule
from imagegen.training.muon import Muon
from tests.devices.cases import batch_of, images_of, labels_of, make
from tests.devices.simulated import Simulation

Way = Callable[[ImageTransformer], Any]
OF_MECHANISMS: dict[str, Way] = {}
OF_HEADS: dict[str, Way] = {}


def way(kind: dict[str, Way]) -> Callable[[Way], Way]:
    """Marks a way that a model is used; what it returns is the same on every device."""

    def mark(function: Way) -> Way:
        kind[function.__name__] = function
        return function

    return mark


@contextlib.contextmanager
def _without_reads() -> Iterator[None]:
    """On a device, nothing may wait for it meanwhile."""
    simulation = Simulation.current
    with contextlib.nullcontext() if simulation is None else simulation.without_reads():
        yield


def _train(
    model: ImageTransformer,
    dtype: torch.dtype | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Tensor]:
    model.train()
    # A large eps, because Adam's first step makes the rounding of tiny gradients as large as lr.
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
    batch = batch_of(model)
    torch.manual_seed(0)
    with _without_reads():
        with torch.autocast(model.device.type, dtype=dtype, enabled=dtype is not None):
            loss = _loss(model, *batch)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return [loss, *(parameter.grad for parameter in model.parameters()), *model.parameters()]


def _loss(model: ImageTransformer, images: Tensor, *others: Tensor) -> Tensor:
    """As in training: of any order, with the regions that the seed gives."""
    images = turn(images, others[1])
    if model.order == "raster":
        return model.bits_per_dim(images, *others).mean()
    return ImageModule(model, torch.optim.AdamW)._region_loss(images, *others)


@way(OF_MECHANISMS)
def training_step(model: ImageTransformer) -> Any:
    return _train(model)


@way(OF_MECHANISMS)
def training_step_in_bfloat16(model: ImageTransformer) -> Any:
    return _train(model, torch.bfloat16)


@way(OF_HEADS)
def training_step_by_muon(model: ImageTransformer) -> Any:
    return _train(model, optimizer=Muon(model.named_parameters()))


@way(OF_MECHANISMS)
@torch.inference_mode()
def prefill_and_steps(model: ImageTransformer) -> Any:
    images, labels, _ = batch_of(model)
    sequence = model.raster.to_sequence(images)
    with _without_reads():
        parameters, state = model.step(None, model.initial_state(len(images), labels))
        found = [parameters]
        for position in range(2):
            parameters, state = model.step(sequence[:, position], state)
            found.append(parameters)
        parameters, state = model.prefill(sequence[:, 2:4], state)
        parameters, state = model.step(
            sequence[:, 4].repeat_interleave(2, dim=0), state.clone().repeat(2)
        )
        first, _ = model.prefill(sequence[:, :4], labels=labels)
        return [*found, parameters, first]


@way(OF_MECHANISMS)
def samples(model: ImageTransformer) -> Any:
    with _as_long_ones(model):
        return list(generate(model, 2, seed=3, labels=[0, -1]))


@way(OF_HEADS)
def completions(model: ImageTransformer) -> Any:
    with _as_long_ones(model):
        return complete(model, images_of(model, 3), [0, 2, 3], 2, seed=3, labels=[1, -1])


@contextlib.contextmanager
def _as_long_ones(model: ImageTransformer) -> Iterator[None]:
    """Short sequences are drawn as long ones are: on a GPU by its recorded steps, unrecorded."""
    made: list[graph.GraphDecoder] = []
    kind, decoder = model.device.type, graph.GraphDecoder

    def unrecorded(model: ImageTransformer) -> graph.GraphDecoder:
        made.append(decoder(model, record=False))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        if kind != "cpu":
            patch.setattr(decode, "SHORTEST", 1)
            patch.setattr(graph, "GraphDecoder", unrecorded)
        yield
    grows = not model.constant_state
    assert bool(made) == (kind == "cuda" and not grows)


@way(OF_HEADS)
def batches(model: ImageTransformer) -> Any:
    return list(generate(model, 5, seed=3, labels=[0, 2, -1], batch_size=3))


@way(OF_HEADS)
def completions_by_plain_steps(model: ImageTransformer) -> Any:
    return complete(model, images_of(model, 2), [0, 2], 2, seed=3)


@way(OF_HEADS)
def completions_by_particles(model: ImageTransformer) -> Any:
    images = images_of(model, 2)
    visible = np.ones(images.shape[:3], dtype=bool)
    visible[:, :2, :1] = False
    with _as_long_ones(model):
        return complete(model, images, visible, 2, seed=3, labels=[1, -1], particles=6)


@way(OF_HEADS)
def guided(model: ImageTransformer) -> Any:
    controls = Controls(guidance=2.0, temperature=0.9, top_p=0.9)
    return list(generate(model, 2, controls=controls, labels=[1]))


@way(OF_HEADS)
def guided_completions(model: ImageTransformer) -> Any:
    controls = Controls(guidance=2.0, temperature=0.0)
    return complete(model, images_of(model, 2), [1, 2], 1, controls=controls, labels=[1])


@way(OF_HEADS)
def temperatures(model: ImageTransformer) -> Any:
    drawn = [next(generate(model, 2, controls=Controls(temperature=0.7, top_p=0.8)))]
    drawn.append(next(generate(model, 2, controls=Controls(temperature=0.0))))
    with contextlib.suppress(UserError):  # Of mixtures only.
        own = Controls(mixture_temperature=0.0, scale_temperature=0.5)
        drawn.append(next(generate(model, 2, controls=own)))
    return drawn


@way(OF_HEADS)
def scores(model: ImageTransformer) -> Any:
    images, labels = images_of(model, 5), labels_of(5)
    return [
        score_images(model, images, batch_size=2, labels=labels),
        score_images(model, images),
        classify_images(model, images, batch_size=3),
    ]


@way(OF_HEADS)
def scores_of_regions(model: ImageTransformer) -> Any:
    images = images_of(model, 3)
    visible = np.ones(images.shape[:3], dtype=bool)
    visible[:2, 1, 0] = visible[2, 2:] = False
    return [
        score_hidden(model, images, visible, 6, batch_size=2, labels=known)[0]
        for known in (None, labels_of(3))
    ]


@way(OF_HEADS)
def surprise(model: ImageTransformer) -> Any:
    images = images_of(model, 3)
    found = [bits_of_pixels(model, images, known, 2) for known in (None, labels_of(3))]
    last = (size - 1 for size in images.shape[1:])
    return [*found, likeliest(model, images), distribution_at(model, images[0], *last)]


@way(OF_HEADS)
def coded(model: ImageTransformer) -> Any:
    pytest.importorskip("constriction")
    images = images_of(model, 3)
    np.testing.assert_array_equal(decode_images(model, encode(model, images), len(images)), images)
    return []  # A code depends on every digit.


@way(OF_HEADS)
def verified(model: ImageTransformer) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("imagegen.evaluation.checks.DRAWS", 2000)
        patch.setattr("imagegen.evaluation.checks.POSITIONS", 3)
        checks = list(all_checks(model, images_of(model, 2), seed=0))
    for check in checks:
        assert check.ok is not False, check
    return [check.name for check in checks]


@way(OF_HEADS)
def pictures_of_a_validation(model: ImageTransformer) -> Any:
    grids = Grids(Path("unused"), n_samples=4, n_completed=2, completions=2)
    split = ImageSplit(images_of(model, 3), np.abs(labels_of(3)))
    trainer: Any = Mock(spec=Trainer, datamodule=Mock(split=lambda name: split))
    module = ImageModule(model, torch.optim.AdamW)
    return [grids._samples(module), grids._completions(trainer, module)]


def check(simulation: Simulation, case: Any, way: Way) -> None:
    """Run a way on both devices.

    The numbers are the same to rounding, which an optimizer's step makes larger, and images are the
    same.
    """
    expected = _expected(case, way)
    with simulation:
        found = _on_cpu(way(make(case).to(simulation.kind)))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, np.ndarray) and one.dtype.kind in "ui":
            np.testing.assert_array_equal(one, other)
        elif isinstance(one, np.ndarray):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=5e-5)
        else:
            assert one == other


_KNOWN: dict[tuple[int, Way], list[Any]] = {}


def _expected(case: Any, way: Way) -> list[Any]:
    """What the CPU makes of it, once for all devices."""
    key = (id(case), way)  # Cases are kept for as long as the tests run.
    if key not in _KNOWN:
        _KNOWN[key] = _on_cpu(way(make(case)))
    return _KNOWN[key]


def _on_cpu(found: Any) -> list[Any]:
    found = found if isinstance(found, list) else [found]
    return [t.detach().cpu().float().numpy() if isinstance(t, Tensor) else t for t in found]


def build_on(simulation: Simulation, case: Any) -> None:
    """Make a model there, as under `torch.device`."""
    with simulation:
        with torch.device(simulation.kind):
            model = make(case)
        assert {t.device for t in model.state_dict().values()} == {simulation.device}
