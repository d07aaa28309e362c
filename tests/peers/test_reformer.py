"""`lsh` beside reformer-pytorch, in float64 and with the same rotations.

Comparable: hashing, shared queries and keys, scores, the union of the rounds in which each key
counts once, a position that sees itself only where it sees no other, projections and gradients.
That is Reformer with `causal=True`, `attend_across_buckets=False` and
`allow_duplicate_attention=False`.

Not comparable in general: who is in whose chunk. Reformer cuts the whole sorted sequence, so that
chunks begin wherever the sizes of all the buckets, later positions included, put them; ours begin
with their bucket. The two agree, chunks and all, where

- each bucket fills whole chunks, here by inputs made so that they do, or
- every position sees all earlier ones of its bucket: two chunks a round in Reformer, which sees the
  chunk before, and one chunk a bucket in ours, with any number of buckets, or
- there is one bucket, which is Reformer's full attention.

Reformer's other settings (seeing across buckets, counting a key once a round) are not offered here.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imagegen.attention.lsh import LSHAttention
from tests.peers import (
    BATCH,
    D_MODEL,
    HEAD_DIM,
    N_HEADS,
    Result,
    assert_same,
    inputs,
    layer,
    peer,
    result,
    stepped,
)

reformer = peer("reformer_pytorch.reformer_pytorch", "reformer-pytorch")


def _theirs(module: LSHAttention, bucket_size: int, **options: Any) -> nn.Module:
    theirs = reformer.LSHSelfAttention(
        D_MODEL,
        N_HEADS,
        bucket_size,
        n_hashes=module.rounds,
        causal=True,
        attend_across_buckets=False,
        allow_duplicate_attention=False,
        **options,
    )
    theirs.toqk, theirs.tov, theirs.to_out = (
        copy.deepcopy(part) for part in (module.qk, module.v, module.out)
    )
    return theirs.double()


def _result_of_theirs(
    monkeypatch: pytest.MonkeyPatch, theirs: Any, module: LSHAttention, x: Tensor
) -> Result:
    """With our rotations in place of its draw, and our number of buckets."""
    hashed = theirs.lsh_attn.hash_vectors

    def draw(shape: tuple[int, ...], **options: Any) -> Tensor:
        assert shape == (1, *module.rotations.shape)
        return module.rotations.unsqueeze(0)

    def hash_vectors(n_buckets: int, vectors: Tensor, **options: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randn", draw)
            return hashed(module.n_buckets, vectors, **options)

    theirs.lsh_attn.hash_vectors = hash_vectors
    return result(theirs(x), x, [[theirs.toqk], [theirs.tov], [theirs.to_out]])


def _assert_ours_is(theirs: Result, module: LSHAttention, x: Tensor) -> None:
    groups = [[module.qk], [module.v], [module.out]]
    assert_same(result(module(x)[0], x, groups), theirs, 1e-8, 1e-8)
    y = stepped(module.step, x, module.initial_state(len(x)))
    assert_same(result(y, x, groups), theirs, 1e-8, 1e-8)


def _directed(rounds: int, n_buckets: int, each: int) -> tuple[LSHAttention, Tensor]:
    """A module, and an input of which each bucket of each round and head gets `each` positions.

    Each round hashes by features of its own, of which the input holds one in either direction.
    """
    module = layer(LSHAttention, rounds=rounds, n_buckets=n_buckets, chunk_size=16)
    half = n_buckets // 2
    assert rounds * half <= HEAD_DIM
    module.rotations.zero_()
    generator = torch.Generator().manual_seed(0)
    length = n_buckets * each
    q = torch.zeros(BATCH, N_HEADS, length, HEAD_DIM, dtype=torch.float64)
    for index in range(rounds):
        features = slice(index * half, (index + 1) * half)
        module.rotations[features, index] = torch.eye(half, dtype=torch.float64)
        for b in range(BATCH):
            for h in range(N_HEADS):
                buckets = torch.arange(n_buckets).repeat(each)
                buckets = buckets[torch.randperm(length, generator=generator)]
                sign = 1.0 - 2.0 * (buckets >= half)
                q[b, h, :, features] = sign[:, None] * torch.eye(half)[buckets % half]
    q += 0.1 * torch.randn(q.shape, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        # The input is what the projection maps to these queries.
        q = q.transpose(1, 2).flatten(2) - module.qk.bias
        x = torch.linalg.solve(module.qk.weight, q.mT).mT
    return module, x.requires_grad_()


@pytest.mark.parametrize(("rounds", "n_buckets"), [(1, 4), (1, 16), (2, 4), (4, 4), (2, 8)])
def test_buckets_that_fill_their_chunks(
    monkeypatch: pytest.MonkeyPatch, rounds: int, n_buckets: int
) -> None:
    module, x = _directed(rounds, n_buckets, each=48)
    counts = module(x)[1].counts
    assert counts.eq(48).all()
    theirs = _theirs(module, bucket_size=16)
    _assert_ours_is(_result_of_theirs(monkeypatch, theirs, module, x), module, x)


@pytest.mark.parametrize(("rounds", "n_buckets"), [(1, 2), (1, 8), (3, 2), (4, 8), (8, 16)])
def test_buckets_that_are_seen_whole(
    monkeypatch: pytest.MonkeyPatch, rounds: int, n_buckets: int
) -> None:
    module = layer(LSHAttention, rounds=rounds, n_buckets=n_buckets, chunk_size=128)
    x = inputs(128)
    assert module(x)[1].counts.unique().numel() > 3
    theirs = _theirs(module, bucket_size=64)
    _assert_ours_is(_result_of_theirs(monkeypatch, theirs, module, x), module, x)


def test_one_bucket() -> None:
    module = layer(LSHAttention, n_buckets=2, chunk_size=112)
    with torch.no_grad():
        module.qk.bias.copy_(10 * module.rotations[:, 0, 0].repeat(N_HEADS))
    x = inputs(100)
    assert module(x)[1].counts[..., 1].eq(0).all()
    theirs = _theirs(module, bucket_size=64, use_full_attn=True)
    groups = [[theirs.toqk], [theirs.tov], [theirs.to_out]]
    _assert_ours_is(result(theirs(x), x, groups), module, x)
