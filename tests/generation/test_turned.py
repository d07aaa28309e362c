"""Completing with a model of eight orientations: as one would by hand, whatever draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.digits import Digits
from imagegen.data.regions import read_region
from imagegen.evaluation.hidden import score_hidden
from imagegen.generation import decode, sampling_request
from imagegen.generation.decode.graph import GraphDecoder
from imagegen.generation.images import from_display
from imagegen.generation.sampling_loop import complete, generate
from imagegen.generation.turned import orientations_for
from imagegen.heads.controls import Controls
from imagegen.model.orientations import WORDS, turn_back
from imagegen.model.transformer import ImageTransformer
from tests.generation.helpers import (
    agrees_with,
    complete_in_runs,
    exact_conditional,
    log_prob_of_all,
    toy,
)
from tests.helpers import manifest, read, sample, save_tiny_checkpoint, tiny_model
from tests.model.helpers import NEIGHBOURHOOD, by_hand, of_one_orientation

SPEC = ImageSpec(6, 6, 1, 17)
REGIONS = ["right:0.5", "left:0.5", "hole:0.4", "bottom:0.5", "top:0.5", "rectangle:[0,1,2,3]"]
BEST = [6, 4, 0, 2, 0, 3]
IN_PARTICLES = [2, 5]


def turning(**options: Any) -> ImageTransformer:
    chosen = {"embedding": NEIGHBOURHOOD, "n_layers": 2, "orders": 8, **options}
    return tiny_model(SPEC, **chosen)


def images_and_regions() -> tuple[np.ndarray, np.ndarray]:
    images = np.random.default_rng(0).integers(0, 17, (len(REGIONS), *SPEC.shape)).astype(np.uint8)
    return images, np.stack([read_region(word).visible(6, 6, 0, 0) for word in REGIONS])


def completed_by_hand(
    model: ImageTransformer, images: np.ndarray, visible: np.ndarray, completions: int, **more: Any
) -> np.ndarray:
    """By models that know one orientation each, of images turned by hand, turned back."""
    found = []
    for i, o in enumerate(BEST):
        turned, mask = (by_hand(torch.from_numpy(part), o).numpy() for part in (images, visible))
        # Only the region of image i is used; the others are kept whole.
        mask[np.arange(len(mask)) != i] = True
        drawn = complete(of_one_orientation(model, o), turned, mask, completions, **more)[i]
        found.append(turn_back(torch.from_numpy(drawn), torch.full((completions,), o)).numpy())
    return np.stack(found)


@pytest.mark.parametrize("how", ["steps", "compiled", "recorded"])
def test_completions_are_those_by_hand(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "compiled":
        monkeypatch.setattr(decode, "SHORTEST", 1)
    elif how == "recorded":
        monkeypatch.setattr(
            sampling_request, "choose_decoder", lambda model, *_: GraphDecoder(model, False)
        )
    model, (images, visible) = turning(), images_and_regions()
    assert (sampling_request.choose_decoder(model, Controls()) is None) == (how == "steps")
    assert orientations_for(model, visible).tolist() == BEST
    needing: list[int] = []
    options: dict[str, Any] = {"seed": 9, "particles": 12}
    drawn = complete(
        model, images, visible, 3, report=lambda image, _: needing.append(image), **options
    )
    assert needing == IN_PARTICLES
    for own, kept, image in zip(drawn, visible, images, strict=True):
        assert (own[:, kept] == image[kept]).all()
    assert (drawn[:, 0] != drawn[:, 1]).any(axis=(1, 2, 3)).all()
    assert np.array_equal(drawn, completed_by_hand(model, images, visible, 3, **options))
    # Whatever is completed beside them.
    again = complete(model, images, visible, 3, batch_size=2, **options)
    assert np.array_equal(again, drawn)
    assert np.array_equal(complete(model, images[:2], visible[:2], 1, **options), drawn[:2, :1])


def test_labels_and_guidance_go_with_it() -> None:
    model, (images, visible) = turning(n_classes=2), images_and_regions()
    options: dict[str, Any] = {"labels": [1, 0], "controls": Controls(guidance=2.0), "particles": 8}
    drawn = complete(model, images, visible, 2, **options)
    assert np.array_equal(drawn, completed_by_hand(model, images, visible, 2, **options))
    assert not np.array_equal(drawn, complete(model, images, visible, 2, particles=8))


def test_other_models_take_images_as_they_are() -> None:
    _, visible = images_and_regions()
    plain, any_order = tiny_model(SPEC), turning(order="any")
    for model in (plain, any_order):
        assert not orientations_for(model, visible).any()
    two = tiny_model(SPEC, flips=True)
    assert orientations_for(two, visible).tolist() == [1, 0, 0, 0, 0, 1]
    model = turning()
    drawn = next(generate(model, 3, seed=5))
    assert np.array_equal(drawn, next(generate(of_one_orientation(model, 0), 3, seed=5)))


def test_particles_follow_the_model_in_the_orientation_that_they_take() -> None:
    model = toy("grey", orders=2)
    with torch.no_grad():
        model.flip.weight.mul_(4)  # type: ignore[union-attr]
    visible = np.array([[True, False, True], [False, True, True], [False, True, True]])
    assert orientations_for(model, visible[None]).tolist() == [1]
    image, drawn, reports = complete_in_runs(model, visible, seed=5)
    assert reports
    mirrored = torch.ones(3**9, dtype=torch.int64)
    logs = log_prob_of_all(model, orientation=mirrored)
    possible, exact, _ = exact_conditional(model, image[:, ::-1], visible[:, ::-1], logs, logs)
    assert agrees_with(drawn[:, :, :, ::-1], possible, exact)
    as_it_is = log_prob_of_all(model)
    _, other, _ = exact_conditional(model, image[:, ::-1], visible[:, ::-1], as_it_is, as_it_is)
    assert not agrees_with(drawn[:, :, :, ::-1], possible, other)


def test_what_is_hidden_is_scored_in_that_orientation() -> None:
    model, (images, visible) = turning(n_classes=2), images_and_regions()
    labels = np.array([1, 0, 1, 0, 1, 0])
    scores, reports = score_hidden(model, images, visible, 64, 4, labels=labels)
    assert list(reports) == IN_PARTICLES
    for i, o in enumerate(BEST):
        turned = (by_hand(torch.from_numpy(part), o).numpy() for part in (images, visible))
        expected, _ = score_hidden(of_one_orientation(model, o), *turned, 64, 4, labels=labels)
        assert scores[i] == pytest.approx(expected[i], rel=1e-5)


def test_the_manifest_says_how_images_were_turned(tmp_path: Path) -> None:
    ckpt = save_tiny_checkpoint(tmp_path / "tiny.ckpt", orders=8, embedding=NEIGHBOURHOOD)
    out, words = tmp_path / "out", ["left:0.5", "top:0.5", "right:0.5"]
    sample(ckpt, out, "task=complete", f"visible=[{','.join(words)}]", "completions=1")
    entries = manifest(out)["images"]
    assert [entry.get("orientation") for entry in entries] == [WORDS[4], None, WORDS[6]]
    assert "particles" not in manifest(out)
    originals = Digits().split("test").images
    for entry, word, original in zip(entries, words, originals, strict=False):
        kept = read_region(word).visible(8, 8, 0, 0)
        drawn = from_display(read(out / entry["completions"][0]), 17)
        assert (drawn[kept] == original[kept]).all()
        assert (drawn[~kept] != original[~kept]).any()
    with pytest.raises(UserError, match="particles=9 has no effect"):
        sample(ckpt, out, "task=complete", "visible=left:0.5", "particles=9")
