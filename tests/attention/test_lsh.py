from __future__ import annotations

import pytest
import torch
from torch import Tensor

from imagegen.attention.lsh import LSHAttention
from imagegen.attention.slots import sort_by_bucket
from imagegen.core.errors import UserError


def _input(length: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, 8, dtype=torch.float64, generator=generator)


def test_slots_hold_each_position_once_in_chunks_of_its_bucket() -> None:
    generator = torch.Generator().manual_seed(0)
    for length, n_buckets, chunk in ((1, 4, 8), (50, 4, 8), (100, 16, 3), (100, 2, 200)):
        buckets = torch.randint(0, n_buckets, (2, 3, length, 2), generator=generator)
        slots = sort_by_bucket(buckets, n_buckets, chunk)
        assert slots.counts.sum(dim=-1).eq(length).all()
        back = slots.position.gather(-1, slots.slot)
        assert back.eq(torch.arange(length)).all()
        for b, h, r in ((0, 0, 0), (1, 2, 1)):
            seen: list[int] = []
            for held in slots.position[b, h, r].view(-1, chunk):
                held = held[held < length]
                assert len(set(buckets[b, h, held, r].tolist())) <= 1
                assert held.tolist() == sorted(held.tolist())
                seen += held.tolist()
            assert sorted(seen) == list(range(length))


@torch.no_grad()
def test_one_bucket_in_one_chunk_is_softmax_without_the_own_position() -> None:
    module = LSHAttention(8, 2, rounds=3, n_buckets=2, chunk_size=64).double()
    module.qk.bias.fill_(10)  # All queries point the same way.
    x = _input(60)
    q, k, _ = module._hashed(x)
    v = module._heads(module.v(x))
    mask = torch.ones(60, 60, dtype=torch.bool).tril(-1)
    mask[0, 0] = True
    y = (q @ k.mT).masked_fill(~mask, -torch.inf).softmax(dim=-1) @ v
    expected = module.out(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x)[0], expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"rounds": 3, "n_buckets": 4, "chunk_size": 32}])
def test_no_output_sees_later_positions_though_they_move_its_chunk(
    dtype: torch.dtype, options: dict
) -> None:
    module = LSHAttention(8, 2, 5, **options).to(dtype)
    x = _input(784).to(dtype)
    expected, _ = module(x)
    for position in (1, 17, 100, 393, 700, 783):
        changed = x.clone()
        changed[:, position:] = 10 * torch.randn_like(changed[:, position:])
        assert torch.equal(module(changed)[0][:, :position], expected[:, :position])


@torch.no_grad()
def test_the_first_position_attends_to_itself() -> None:
    module = LSHAttention(8, 2).double()
    x = _input(30)
    torch.testing.assert_close(module(x)[0][:, 0], module.out(module.v(x[:, 0])))


def test_gradients_are_finite_where_nothing_is_seen() -> None:
    module = LSHAttention(8, 2, rounds=2, n_buckets=64)
    x = _input(9).float().requires_grad_()
    module(x)[0].square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())


@torch.no_grad()
def test_hashes_depend_on_the_seed_and_the_layer_only() -> None:
    rotations = LSHAttention(8, 2, rounds=3).rotations
    torch.manual_seed(123)
    assert torch.equal(LSHAttention(8, 2, rounds=3).rotations, rotations)
    assert not torch.equal(LSHAttention(8, 2, rounds=3, layer=1).rotations, rotations)
    assert not torch.equal(LSHAttention(8, 2, rounds=3, hash_seed=1).rotations, rotations)
    assert "rotations" in LSHAttention(8, 2).state_dict()


@torch.no_grad()
def test_more_rounds_come_closer_to_full_attention() -> None:
    x = 3 * _input(150)
    errors = []
    for rounds in (1, 4, 16):
        module = LSHAttention(8, 1, rounds=rounds, n_buckets=4, chunk_size=160).double()
        torch.nn.init.eye_(module.qk.weight).mul_(4)
        q, k, _ = module._hashed(x)
        v = module._heads(module.v(x))
        mask = torch.ones(150, 150, dtype=torch.bool).tril(-1)
        mask[0, 0] = True
        full = (q @ k.mT).masked_fill(~mask, -torch.inf).softmax(dim=-1) @ v
        full = module.out(full.transpose(1, 2).flatten(2))
        scale = (full - module.out.bias).square().mean()
        errors.append(((module(x)[0] - full).square().mean() / scale).item())
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


@torch.no_grad()
def test_the_history_grows_without_a_copy_each_step() -> None:
    module = LSHAttention(8, 2)
    state = module.initial_state(1)
    for _ in range(65):
        _, state = module.step(torch.randn(1, 8), state)
    memory = state.keys.data_ptr()
    for _ in range(60):
        _, state = module.step(torch.randn(1, 8), state)
    assert (state.length, state.keys.data_ptr()) == (125, memory)
    assert state.counts.sum(dim=-1).eq(125).all()


@torch.no_grad()
def test_steps_in_float32_are_the_parallel_form() -> None:
    module = LSHAttention(8, 2, rounds=2, n_buckets=4, chunk_size=16)
    x = _input(200).float()
    expected, state = module(x)[0], module.initial_state(2)
    for position in range(200):
        y, state = module.step(x[:, position], state)
        torch.testing.assert_close(y, expected[:, position], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rounds": 0}, "attention.rounds=0 must be at least 1"),
        ({"chunk_size": 0}, "attention.chunk_size=0 must be a multiple of 16"),
        ({"chunk_size": 24}, "attention.chunk_size=24 must be a multiple of 16"),
        ({"hash_seed": -1}, "attention.hash_seed=-1"),
        ({"n_buckets": 7}, "attention.n_buckets=7 must be an even number"),
        ({"n_buckets": 0}, "attention.n_buckets=0"),
    ],
)
def test_impossible_choices_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        LSHAttention(8, 2, **options)
