"""Sort positions by the bucket that hashing puts them in, and cut the buckets into chunks.

Axes: `b` batch, `n` position, `h` head, `r` hash round, `p` bucket, `s` slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

# A code is bucket * BUCKET + the chunk inside the bucket, so that one subtraction compares both.
BUCKET = 2**32
NO_CODE = -BUCKET


@dataclass
class Slots:
    """Positions sorted by bucket; each bucket begins a new chunk, so there are gaps.

    Attributes:
        slot: where each position is.
        position: which position is in each slot; the length of the sequence in gaps.
        codes: bucket and chunk of each position.
        counts: number of positions in each bucket.
    """

    slot: Int64[Tensor, "b h r n"]
    position: Int64[Tensor, "b h r s"]
    codes: Int64[Tensor, "b h n r"]
    counts: Int64[Tensor, "b h r p"]


def sort_by_bucket(buckets: Int64[Tensor, "b h n r"], n_buckets: int, chunk_size: int) -> Slots:
    """Give every position a slot: by bucket, and in order inside it.

    The place inside a bucket, and with it the chunk there, depends on earlier positions only.
    """
    length = buckets.shape[2]
    buckets = buckets.mT.contiguous()
    order = buckets.argsort(dim=-1, stable=True)
    ordered = buckets.gather(-1, order)
    counts = buckets.new_zeros(*buckets.shape[:-1], n_buckets)
    counts = counts.scatter_add(-1, buckets, torch.ones_like(buckets))
    chunks = -(-counts // chunk_size)
    first = (counts.cumsum(dim=-1) - counts).gather(-1, ordered)
    first_chunk = (chunks.cumsum(dim=-1) - chunks).gather(-1, ordered)
    rank = torch.arange(length, device=buckets.device) - first
    slot = first_chunk * chunk_size + rank
    code = ordered * BUCKET + rank // chunk_size

    # The most that could be needed: shapes that followed the content could change the rounding.
    gaps = min(length, n_buckets) * (chunk_size - 1)
    n_chunks = min(length, (length + gaps) // chunk_size)
    position = buckets.new_full((*buckets.shape[:-1], n_chunks * chunk_size), length)
    return Slots(
        torch.empty_like(slot).scatter(-1, order, slot),
        position.scatter(-1, slot, order),
        torch.empty_like(code).scatter(-1, order, code).mT,
        counts,
    )


def sees(
    code: Int64[Tensor, "... i 1"], other: Int64[Tensor, "... 1 j"]
) -> Bool[Tensor, "... i j"]:
    """Whether the other position is in the same chunk of the same bucket, or in the one before."""
    difference = code - other
    return (difference == 0) | (difference == 1)
