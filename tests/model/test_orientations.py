"""Orientations: the group, what a model is told of them, and that its forms agree on it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.model.orientations import (
    best_orientation,
    check_orders,
    pixels_of,
    turn,
    turn_back,
)
from imagegen.model.transformer import ImageTransformer
from tests.helpers import save_tiny_checkpoint, tiny_model
from tests.model.helpers import NEIGHBOURHOOD, by_hand, of_one_orientation


def test_each_orientation_is_what_its_name_says() -> None:
    images = torch.arange(8 * 3 * 3 * 2).view(8, 3, 3, 2)
    every = torch.arange(8)
    turned = turn(images, every)
    for orientation, image in enumerate(images):
        assert torch.equal(turned[orientation], by_hand(image[None], orientation)[0])
    assert torch.equal(turn(images[..., 0], every), turned[..., 0])
    assert torch.equal(turn_back(turned, every), images)
    assert torch.equal(pixels_of(8, 3, 3)[5], torch.tensor([6, 3, 0, 7, 4, 1, 8, 5, 2]))
    oblong = torch.arange(4 * 2 * 3).view(4, 2, 3)
    turned = turn(oblong, every[:4])
    for orientation, image in enumerate(oblong):
        assert torch.equal(turned[orientation], by_hand(image[None], orientation)[0])
    assert torch.equal(turn_back(turned, every[:4]), oblong)


@pytest.mark.parametrize("orders", [1, 2, 4, 8])
def test_the_orientations_that_a_model_knows_are_a_group(orders: int) -> None:
    every = torch.arange(orders)
    found = turn(torch.arange(9).view(1, 3, 3).expand(orders, -1, -1), every)
    known = {tuple(each.flatten().tolist()) for each in found}
    assert len(known) == orders
    for one, other in itertools.product(range(orders), repeat=2):
        both = turn(found[one][None], torch.tensor([other]))
        assert tuple(both.flatten().tolist()) in known
    for inverse in turn_back(torch.arange(9).view(1, 3, 3).expand(orders, -1, -1), every):
        assert tuple(inverse.flatten().tolist()) in known


def test_the_best_orientation_has_the_fewest_pairs_in_the_wrong_order() -> None:
    def pairs(visible: Tensor) -> int:
        flat = visible.flatten().tolist()
        return sum(not flat[i] and flat[j] for j in range(len(flat)) for i in range(j))

    left = torch.arange(4).expand(4, 4) < 2
    sides = {"top": left.T, "left": left, "right": ~left, "bottom": ~left.T}
    found = {side: best_orientation(mask, 8) for side, mask in sides.items()}
    assert found == {"top": 0, "left": 4, "right": 6, "bottom": 2}
    assert [best_orientation(sides["right"], orders) for orders in (1, 2, 4)] == [0, 1, 1]
    generator = torch.Generator().manual_seed(0)
    for orders, share in itertools.product((2, 4, 8), (0.1, 0.5, 0.9)):
        for _ in range(5):
            mask = torch.rand(4, 4, generator=generator) < share
            counts = [pairs(by_hand(mask[None], o)[0]) for o in range(orders)]
            assert best_orientation(mask, orders) == counts.index(min(counts))


def turning_model(spec: ImageSpec, **options: Any) -> ImageTransformer:
    chosen = {"embedding": NEIGHBOURHOOD, "n_layers": 2, "orders": 8, **options}
    return tiny_model(spec, **chosen).double()


@torch.no_grad()
@pytest.mark.parametrize("tokens", ["pixel", "subpixel"])
def test_an_image_counts_as_a_plain_model_counts_it_turned_by_hand(tokens: str) -> None:
    """An area of a label is the same part of the original image in every orientation."""
    spec = ImageSpec(4, 4, 3, 17)
    model = turning_model(spec, tokens=tokens, n_classes=3, label_grid=2)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 17, (8, *spec.shape), dtype=torch.uint8, generator=generator)
    labels, every = torch.tensor([0, 1, 2, -1, 0, 1, 2, 0]), torch.arange(8)
    found = model.log_prob(turn(images, every), labels, every)
    for o in range(8):
        turned, label = by_hand(images[o : o + 1], o), labels[o : o + 1]
        expected = of_one_orientation(model, o).log_prob(turned, label)
        torch.testing.assert_close(found[o : o + 1], expected, rtol=1e-10, atol=1e-10)
        if o:
            assert not torch.allclose(found[o : o + 1], model.log_prob(turned, label))
    assert torch.equal(model.log_prob(images, labels), model.log_prob(images, labels, 0 * every))


@torch.no_grad()
@pytest.mark.parametrize("order", ["raster", "any"])
def test_forms_agree_at_every_split_and_states_carry_the_orientation(order: str) -> None:
    # Areas of different sizes, which mirroring does not map onto each other.
    spec = ImageSpec(5, 5, 1, 17)
    model = turning_model(spec, order=order, n_classes=2, label_grid=3)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 17, (8, *spec.shape), dtype=torch.uint8, generator=generator)
    orientation, labels = torch.arange(7, -1, -1), torch.tensor([0, 1, -1, 1, 0, 1, 0, 1])
    sequence = model.raster.to_sequence(images)
    expected = model.parameters_of(sequence, labels, orientation)

    def close(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

    parameters, state = model.step(None, model.initial_state(8, labels, orientation=orientation))
    close(parameters, expected[:, 0])
    rows = torch.tensor([6, 1, 1])
    for split in range(1, sequence.shape[1] - 3):
        parameters, state = model.step(sequence[:, split - 1], state)
        close(parameters, expected[:, split])
        found, forked = model.prefill(sequence[:, :split], None, labels, orientation)
        close(found, expected[:, split])
        found, _ = model.step(sequence[rows, split], forked.select(rows))
        close(found, expected[rows, split + 1])
        found, _ = model.prefill(sequence[:, split : split + 3], forked.clone())
        close(found, expected[:, split + 3])
        found, _ = model.step(sequence[:, split].repeat_interleave(2, dim=0), forked.repeat(2))
        close(found, expected[:, split + 1].repeat_interleave(2, dim=0))


@torch.no_grad()
def test_flips_are_two_orders_and_their_checkpoints_load(tmp_path: Path) -> None:
    options = {"embedding": NEIGHBOURHOOD, "n_classes": 10, "label_grid": 2}
    path = save_tiny_checkpoint(tmp_path / "flips.ckpt", flips=True, **options)
    flips = load_checkpoint(path).model
    assert flips.orders == 2
    assert flips.state_dict()["flip.weight"].shape == (2, 16)
    orders = tiny_model(flips.spec, orders=2, **options)
    orders.load_state_dict(flips.state_dict())
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 17, (2, *flips.spec.shape), dtype=torch.uint8, generator=generator)
    labels, mirrored = torch.tensor([3, 3]), torch.tensor([0, 1])
    found = flips.log_prob(images, labels, mirrored)
    assert torch.equal(found[0], orders.log_prob(images, labels, mirrored)[0])
    # Labels of before had areas of the mirrored image.
    assert not torch.allclose(found[1], orders.log_prob(images, labels, mirrored)[1])
    for area in (flips.label, orders.label):
        assert area is not None
        area.areas = None
    both = [model.log_prob(images, labels, mirrored) for model in (flips, orders)]
    assert torch.equal(*both)
    assert tiny_model(flips.spec, flips=True, orders=8).orders == 8
    assert load_checkpoint(save_tiny_checkpoint(tmp_path / "plain.ckpt")).model.orders == 1


@pytest.mark.parametrize(
    ("orders", "size", "sentence"),
    [
        (3, (4, 4), "model.orders=3 must be 1, 2, 4 or 8."),
        (0, (4, 4), "model.orders=0 must be 1, 2, 4 or 8."),
        (8, (28, 30), "but 28x30 pixels are not square; use model.orders=4."),
    ],
)
def test_impossible_orders_are_refused(orders: int, size: tuple[int, int], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_orders(orders, *size)
    with pytest.raises(UserError, match=sentence):
        tiny_model(ImageSpec(*size), orders=orders)
