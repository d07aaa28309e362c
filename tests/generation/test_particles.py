"""Particles against exact enumeration: what they draw, what they weigh, what they report."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.generation import decode, particles
from imagegen.generation.decode.fused import FusedDecoder
from imagegen.generation.particles import Report, draw_particles
from imagegen.generation.sampling_loop import complete, generate
from imagegen.generation.sampling_request import SamplingRequest, kept_steps
from imagegen.heads.controls import Controls
from imagegen.model.transformer import NO_LABEL
from tests.generation.helpers import (
    RUNS,
    agrees_with,
    complete_in_runs,
    every_image,
    exact_conditional,
    log_prob_of_all,
    mask_of,
    toy,
)
from tests.helpers import tiny_model
from tests.model.helpers import NEIGHBOURHOOD


@pytest.mark.parametrize(
    ("kind", "compiled", "resampled"),
    [
        ("grey", False, 0.5),
        ("grey", True, 1.0),
        ("sub-pixels", False, 1.0),
        ("pixels", False, 1.0),
        ("pixels", True, 0.8),
    ],
)
def test_the_distribution_given_what_is_kept(
    kind: str, compiled: bool, resampled: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "SHORTEST", 1 if compiled else 1 << 30)
    monkeypatch.setattr(particles, "RESAMPLED", resampled)
    model, visible = toy(kind), mask_of(kind)
    image, drawn, reports = complete_in_runs(model, visible, seed=5, precision="32")
    assert (sum(report.resamplings for report in reports) > RUNS / 2) == (resampled > 0.5)
    logs = log_prob_of_all(model)
    possible, exact, evidence = exact_conditional(model, image, visible, logs, logs)
    assert agrees_with(drawn, possible, exact)
    # The model on its own, without regard to the kept pixels, would be told apart.
    _, blind, _ = exact_conditional(model, image, visible, torch.zeros_like(logs), logs)
    assert not agrees_with(drawn, possible, blind)
    ratios = np.exp([report.log_evidence for report in reports]) / evidence
    assert abs(ratios.mean() - 1) < 4 * ratios.std() / np.sqrt(RUNS)


@pytest.mark.parametrize("compiled", [False, True])
def test_any_order_draws_from_its_own_conditional(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No particles: what is kept comes first."""
    monkeypatch.setattr(decode, "SHORTEST", 1 if compiled else 1 << 30)
    model, visible = toy("grey", order="any"), mask_of("grey")
    image, drawn, reports = complete_in_runs(model, visible, seed=5, precision="32")
    assert not reports
    every = every_image(model.spec)
    fits = (every.numpy() == image)[:, visible].reshape(len(every), -1).all(axis=1)
    for region, agrees in ((visible, True), (np.zeros_like(visible), False)):
        shown = torch.from_numpy(region).expand(len(every), 3, 3)
        exact = log_prob_of_all(model, visible=shown).sum(dim=1)[fits].softmax(dim=0)
        assert agrees_with(drawn, every.numpy()[fits], exact.double().numpy()) == agrees


def test_the_evidence_is_right_on_average_with_few_particles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(particles, "RESAMPLED", 0.9)
    model, visible, runs = toy("grey"), mask_of("grey"), 200
    image = next(generate(model, 1, seed=2))[0]
    kept, request = kept_steps(model, visible), SamplingRequest.of(model, 0, None, None, None)
    reports = [draw_particles(model, image, kept, i, [0], request, 2)[1] for i in range(runs)]
    assert sum(report.resamplings for report in reports) > 20
    logs = log_prob_of_all(model)
    ratios = np.exp([report.log_evidence for report in reports])
    ratios /= exact_conditional(model, image, visible, logs, logs)[2]
    assert abs(ratios.mean() - 1) < 3 * ratios.std() / np.sqrt(runs)
    assert ratios.std() > 0.2


def test_controls_change_what_is_drawn_not_what_is_weighed() -> None:
    model, visible = toy("grey"), mask_of("grey")
    image, drawn, _ = complete_in_runs(model, visible, controls=Controls(temperature=0.5))
    sequences = model.raster.to_sequence(every_image(model.spec))
    with torch.no_grad():
        logits = model.parameters_of(sequences)
    cooled = model.head.log_prob(logits / 0.5, sequences).sum(dim=-1)
    assert agrees_with(
        drawn, *exact_conditional(model, image, visible, log_prob_of_all(model), cooled)[:2]
    )
    assert not agrees_with(drawn, *exact_conditional(model, image, visible, cooled, cooled)[:2])


def test_where_nothing_is_left_to_chance_one_particle_is_all_of_them() -> None:
    model, visible = toy("grey"), mask_of("grey")
    image = next(generate(model, 1, seed=2))
    for count in (1, 9):
        reports: list[Report] = []
        greedy = complete(
            model,
            image,
            visible[None],
            2,
            controls=Controls(temperature=0.0),
            particles=count,
            report=lambda _, report, reports=reports: reports.append(report),  # type: ignore[misc]
        )
        assert np.array_equal(greedy[:, 0], greedy[:, 1])
        assert (reports[0].particles, reports[0].collapsed) == (1, False)


def test_guidance_changes_what_is_drawn_not_what_is_weighed() -> None:
    model, visible = toy("grey", n_classes=2), mask_of("grey")
    with torch.no_grad():
        model.label.weight.mul_(8)  # type: ignore[union-attr]
    every = every_image(model.spec)
    controls = Controls(guidance=2.5)
    image, drawn, _ = complete_in_runs(model, visible, labels=[1], controls=controls)
    sequences = model.raster.to_sequence(every)
    with torch.no_grad():
        with_it, without = (
            model.parameters_of(sequences, torch.full((len(every),), label)).log_softmax(-1)
            for label in (1, NO_LABEL)
        )
    guided = (without + 2.5 * (with_it - without)).log_softmax(-1)
    guided = guided.gather(-1, sequences.long()).squeeze(-1)
    weighed = log_prob_of_all(model, labels=torch.ones(len(every), dtype=torch.int64))
    assert agrees_with(drawn, *exact_conditional(model, image, visible, weighed, guided)[:2])
    assert not agrees_with(drawn, *exact_conditional(model, image, visible, weighed, weighed)[:2])


def test_completions_spread_over_the_particles() -> None:
    """The first few of them already hold what all of them do, each as often as it is likely."""
    model, visible = toy("grey"), mask_of("grey")
    image = next(generate(model, 1, seed=2))[0]
    kept, request = kept_steps(model, visible), SamplingRequest.of(model, 0, None, None, None)
    many, report = draw_particles(model, image, kept, 0, range(256), request, 256)
    few, _ = draw_particles(model, image, kept, 0, range(8), request, 256)
    np.testing.assert_array_equal(few, many[:8])
    frequent, counts = np.unique(many.reshape(256, -1), axis=0, return_counts=True)
    assert 4 <= len(frequent) <= report.distinct
    hits = (few.reshape(8, 1, -1) == frequent[counts > 64]).all(axis=2).sum(axis=0)
    # Neighbours of equal shares hold eight points at intervals of an eighth, to within two.
    assert (np.abs(hits - counts[counts > 64] / 32) <= 2).all()


def test_a_report_knows_whether_the_particles_have_collapsed() -> None:
    assert Report(256, 7.2, 3, 200, 0.0).collapsed
    assert Report(256, 90.0, 3, 5, 0.0).left == 5
    assert not Report(256, 9.0, 3, 12, 0.0).collapsed
    assert Report(8, 1.0, 3, 1, 0.0).collapsed
    assert not Report(8, 2.0, 3, 2, 0.0).collapsed
    assert not Report(1, 1.0, 0, 1, 0.0).collapsed


def test_compiled_particles_are_those_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three micro-batches, two of them at a time, whose states are exchanged."""
    from imagegen.generation.decode import fused

    monkeypatch.setattr(fused, "MICRO_BATCH", 12)
    spec = ImageSpec(5, 4, 1, 17)
    model = tiny_model(spec, embedding=NEIGHBOURHOOD, n_layers=2)
    image = np.random.default_rng(0).integers(0, 17, spec.shape).astype(np.uint8)
    monkeypatch.setattr(particles, "RESAMPLED", 0.99)
    visible = np.arange(20).reshape(5, 4) % 4 < 2
    found = []
    for decoder in (None, FusedDecoder(model)):
        request = SamplingRequest(3, Controls(), None, None, decoder)
        kept = kept_steps(model, visible)
        found.append(draw_particles(model, image, kept, 0, range(30), request, 30))
    (drawn, report), (expected, wanted) = found
    assert (drawn == expected).reshape(30, -1).all(axis=1).mean() >= 0.9
    assert report.log_evidence == pytest.approx(wanted.log_evidence, abs=0.02)
    assert report.resamplings == wanted.resamplings >= 1


def test_a_diverged_model_is_refused() -> None:
    model, visible = toy("grey"), mask_of("grey")
    with torch.no_grad():
        next(model.head.parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match="no probability for a pixel that is kept, so its training"):
        complete(model, np.zeros((1, 3, 3, 1), np.uint8), visible[None], 1, particles=4)
