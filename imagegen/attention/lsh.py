"""Attention by locality-sensitive hashing (Reformer: Kitaev et al., 2020), made exactly causal.

Axes: `b` batch, `n` position, `h` head, `r` hash round, `d` query/key feature, `m` value feature,
`e` model width, `p` bucket, `s` slot (positions sorted by bucket, with gaps), `k` key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.attention.base import AttentionState, CausalAttention
from imagegen.attention.buffers import history_step
from imagegen.attention.partial_softmax import PartialSoftmax, partial_softmax
from imagegen.attention.slots import BUCKET, NO_CODE, Slots, sees, sort_by_bucket
from imagegen.core.errors import UserError

# Matrix products may round differently where a matrix is not aligned in memory. A chunk's place
# depends on later positions; in multiples of this many slots, all are aligned alike (64 bytes).
CHUNK_MULTIPLE = 16


@dataclass
class LSHState(AttentionState):
    """Keys and values of all positions, float32 at least, and where hashing has put them.

    The first `length` places of keys, values and codes are taken. A code says bucket and chunk;
    `counts` has the number of positions in each bucket.
    """

    keys: Float[Tensor, "b h capacity d"]
    values: Float[Tensor, "b h capacity m"]
    codes: Int64[Tensor, "b h capacity r"]
    counts: Int64[Tensor, "b h r p"]
    length: int = 0


def chunked_lsh_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n m"],
    slots: Slots,
    chunk_size: int,
) -> Float[Tensor, "b h n m"]:
    """Attention over the union of what the rounds let each position see (eq. 6), in chunks.

    Time and memory are linear in `n`.

    Args:
        q: scaled queries.
        k: normalised keys.
        v: values, which are also the output of positions that see no other.
        slots: from `sort_by_bucket`.
        chunk_size: slots of a chunk.
    """
    rounds = range(slots.slot.shape[2])
    parts = (_round_part(q, k, v, slots, index, chunk_size) for index in rounds)
    return reduce(PartialSoftmax.merged, parts).result_or(v)


def _round_part(
    q: Tensor, k: Tensor, v: Tensor, slots: Slots, index: int, chunk_size: int
) -> PartialSoftmax:
    """Attention over what one round lets each position see."""
    length, n_rounds = q.shape[2], slots.codes.shape[-1]
    position = slots.position[:, :, index]
    # Gaps hold a copy of the last position that nothing sees.
    rows = position.clamp(max=length - 1)
    keys = _with_chunk_before(_chunks(_rows(k, rows), chunk_size), 0)
    values = _with_chunk_before(_chunks(_rows(v, rows), chunk_size), 0)
    codes = slots.codes.gather(2, rows.unsqueeze(-1).expand(-1, -1, -1, n_rounds))
    codes = codes.masked_fill((position == length).unsqueeze(-1), NO_CODE)
    codes = _chunks(codes, chunk_size)
    others = _with_chunk_before(codes, NO_CODE).mT
    position = _chunks(position.unsqueeze(-1), chunk_size)
    earlier = _with_chunk_before(position, length).mT < position

    scores = _chunks(_rows(q, rows), chunk_size) @ keys.mT
    visible = earlier & sees(codes[..., index, None], others[..., index, None, :])
    if n_rounds > 1:
        # A key that several rounds let a query see counts once in all (appendix A).
        often = torch.zeros_like(scores, requires_grad=False)
        for other in range(n_rounds):
            often += sees(codes[..., other, None], others[..., other, None, :])
        scores = scores - often.clamp_(min=1).log_()
    part = partial_softmax(scores, visible, values)
    slot = slots.slot[:, :, index]
    return part.map(lambda t: _rows(rearrange(t, "b h c l f -> b h (c l) f"), slot))


def _chunks(t: Tensor, size: int) -> Tensor:
    return rearrange(t, "b h (c l) f -> b h c l f", l=size)


def _rows(t: Float[Tensor, "b h n f"], index: Int64[Tensor, "b h s"]) -> Float[Tensor, "b h s f"]:
    """t[b, h, index[b, h, s]]."""
    batch, heads, length, _ = t.shape
    start = torch.arange(0, batch * heads * length, length, device=t.device)
    # An embedding gathers rows, and adds them up in the backward pass, faster than indexing does.
    return F.embedding(index + start.view(batch, heads, 1), t.flatten(0, 2))


def _with_chunk_before(chunks: Tensor, fill: int) -> Tensor:
    """Each "l f" of "b h c l f" with the one before it; `fill` precedes the first."""
    before = F.pad(chunks, (0, 0, 0, 0, 1, 0), value=fill)[:, :, :-1]
    return torch.cat([before, chunks], dim=3)


class LSHAttention(CausalAttention[LSHState]):
    """Multi-head attention over positions whose queries fall into the same bucket.

    o_i = sum_j exp(q_i^T k_j / sqrt(d) - z(i, P_i)) v_j over j in P_i (eq. 2), z its normaliser,
    with keys k_j = q_j / |q_j| and the union P_i of P_i^r over `rounds` (eq. 6). Round r hashes by
    random rotations R_r, h(x) = argmax([x R_r; -x R_r]) (section 2); positions are sorted by
    bucket and cut into chunks, and each one sees its chunk and the chunk before (eq. 5). A
    position sees itself only where it sees no other.

    The paper cuts the whole sorted sequence into chunks. A later position then shifts the chunks
    of earlier ones and so decides what these see, which no step by step form can know. Here each
    bucket is cut into chunks by itself, counted from its first position: P_i^r holds the earlier
    positions of i's bucket in i's chunk and in the chunk before. It depends on the past only, has
    `chunk_size` to 2 chunk_size - 1 positions once the bucket has as many, and costs as much, but
    for at most one chunk with gaps a bucket: the parallel form has n / chunk_size + n_buckets
    chunks. The number of buckets is fixed, as it cannot follow the length of a sequence that is
    still to be generated.

    Hashing is computed in float32 at least. The steps decide as the parallel form does but for
    rounding: a query on the border of two buckets to the last digit may fall either way.

    Args:
        rounds: hashes r; more of them miss fewer similar positions.
        n_buckets: even; the paper takes 2 n / chunk_size, here fewer leave fewer gaps.
        chunk_size: positions of a chunk, a multiple of 16.
        hash_seed: of the rotations, which differ between layers. They are kept in checkpoints.
        context: see `CausalAttention`.

    Raises:
        UserError: for rounds, chunks, buckets or a seed that the above excludes.
    """

    rotations: Tensor

    constant_state = False

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        rounds: int = 1,
        n_buckets: int = 16,
        chunk_size: int = 16,
        hash_seed: int = 0,
        **context: Any,
    ) -> None:
        super().__init__(d_model, n_heads, head_dim, **context)
        for name, value, least in (
            ("rounds", rounds, 1),
            ("hash_seed", hash_seed, 0),
        ):
            if value < least:
                raise UserError(f"attention.{name}={value} must be at least {least}.")
        if n_buckets < 2 or n_buckets % 2:
            raise UserError(
                f"attention.n_buckets={n_buckets} must be an even number of at least 2, because "
                "each direction of a rotation gives two buckets."
            )
        if chunk_size < 1 or chunk_size % CHUNK_MULTIPLE:
            raise UserError(
                f"attention.chunk_size={chunk_size} must be a multiple of {CHUNK_MULTIPLE}, "
                f"such as {CHUNK_MULTIPLE} or {2 * CHUNK_MULTIPLE}."
            )
        self.rounds = rounds
        self.n_buckets = n_buckets
        self.chunk_size = chunk_size
        inner = self.n_heads * self.head_dim
        self.qk = nn.Linear(d_model, inner)
        self.v = nn.Linear(d_model, inner)
        self.out = nn.Linear(inner, d_model)
        seed = np.random.SeedSequence([hash_seed, self.layer]).generate_state(1).item()
        shape = (self.head_dim, rounds, n_buckets // 2)
        if self.qk.weight.is_meta:
            rotations = self.qk.weight.new_empty(shape)
        else:
            generator = torch.Generator().manual_seed(seed)
            rotations = torch.randn(shape, generator=generator, device="cpu").to(self.qk.weight)
        self.register_buffer("rotations", rotations)

    def forward(
        self, x: Float[Tensor, "b n e"], state: LSHState | None = None
    ) -> tuple[Float[Tensor, "b n e"], LSHState]:
        state = state or self.initial_state(x.shape[0])
        past = slice(0, state.length)
        v = self._heads(self.v(x))
        with torch.autocast(x.device.type, enabled=False):
            q, k, buckets = self._hashed(x)
            # What earlier positions see is known, and computed again for the sake of the layout.
            q = F.pad(q, (0, 0, state.length, 0))
            k = torch.cat([state.keys[:, :, past], k], dim=2)
            v = torch.cat([state.values[:, :, past], v.to(k.dtype)], dim=2)
            buckets = torch.cat([state.codes[:, :, past] // BUCKET, buckets], dim=2)
            # A longer chunk than the sequence sees as much, and would cost its full length.
            chunk = min(self.chunk_size, math.ceil(k.shape[2] / CHUNK_MULTIPLE) * CHUNK_MULTIPLE)
            slots = sort_by_bucket(buckets, self.n_buckets, chunk)
            y = chunked_lsh_attention(q, k, v, slots, chunk)[:, :, state.length :]
        state = LSHState(k, v, slots.codes, slots.counts, k.shape[2])
        return self.out(rearrange(y, "b h n m -> b n (h m)").to(x.dtype)), state

    def step(
        self, x: Float[Tensor, "b e"], state: LSHState
    ) -> tuple[Float[Tensor, "b e"], LSHState]:
        x = x.unsqueeze(1)
        v = self._heads(self.v(x))
        with torch.autocast(x.device.type, enabled=False):
            q, k, buckets = self._hashed(x)
            v = v.to(k.dtype)
            bucket = buckets.mT
            code = buckets * BUCKET + state.counts.gather(-1, bucket).mT // self.chunk_size
            state = LSHState(
                history_step(state.keys, k, state.length),
                history_step(state.values, v, state.length),
                history_step(state.codes, code, state.length),
                state.counts.scatter_add(-1, bucket, torch.ones_like(bucket)),
                state.length + 1,
            )
            past = slice(0, state.length)
            codes = state.codes[:, :, past]
            visible = sees(code.unsqueeze(-1).transpose(2, 3), codes.mT.unsqueeze(-2)).any(dim=2)
            visible[..., -1] = False
            scores = q @ state.keys[:, :, past].mT
            y = partial_softmax(scores, visible, state.values[:, :, past]).result_or(v)
        return self.out(rearrange(y, "b h 1 m -> b (h m)").to(x.dtype)), state

    def initial_state(self, batch_size: int) -> LSHState:
        weight = self.qk.weight
        shape = (batch_size, self.n_heads)
        keys = torch.zeros(
            (*shape, 0, self.head_dim),
            dtype=torch.promote_types(weight.dtype, torch.float32),
            device=weight.device,
        )
        codes = torch.zeros((*shape, 0, self.rounds), dtype=torch.int64, device=weight.device)
        return LSHState(
            keys, keys.clone(), codes, codes.new_zeros(*shape, self.rounds, self.n_buckets)
        )

    def _heads(self, t: Tensor) -> Tensor:
        return rearrange(t, "b n (h d) -> b h n d", h=self.n_heads)

    def _hashed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries and normalised keys "b h n d", and their buckets "b h n r".

        Called without autocast: in low precision, many queries would fall into another bucket.
        """
        weight = self.qk.weight
        qk = self._heads(self.qk(x.to(weight.dtype)))
        qk = qk.to(torch.promote_types(weight.dtype, torch.float32))
        rotated = (qk @ self.rotations.to(qk.dtype).flatten(1)).unflatten(-1, (self.rounds, -1))
        buckets = torch.cat([rotated, -rotated], dim=-1).argmax(dim=-1)
        return qk / math.sqrt(self.head_dim), F.normalize(qk, dim=-1), buckets
