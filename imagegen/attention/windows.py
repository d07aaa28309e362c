"""Cut a sequence into blocks whose queries see a sliding window of keys.

Axes: `b` batch, `h` head, `n` query, `k` key, `c` block, `l` query inside a block, `t` key that a
block may see, `d` query/key feature, `m` value feature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

SHORTEST_BLOCK = 64


@dataclass
class WindowBlocks:
    """Queries in blocks, and the keys and values that each block may see.

    Keys and values of neighbouring blocks overlap; they are views, not copies.
    """

    q: Float[Tensor, "b h c l d"]
    k: Float[Tensor, "b h c t d"]
    v: Float[Tensor, "b h c t m"]
    visible: Bool[Tensor, "c l t"]


def window_blocks(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h k d"],
    v: Float[Tensor, "b h k m"],
    window: int,
) -> WindowBlocks:
    """Blocks in which query i sees the last `window` keys up to its own.

    Time and memory grow with n * window.

    Args:
        q: queries.
        k, v: keys and values of the same positions, and of those before the first query.
        window: at least 1.
    """
    length = q.shape[2]
    before = k.shape[2] - length
    window = min(window, before + length)
    block = min(max(window, SHORTEST_BLOCK), length)
    n_blocks = math.ceil(length / block)
    after = n_blocks * block - length
    # A negative padding cuts off what is too far back to be seen.
    missing = window - 1 - before
    q = rearrange(F.pad(q, (0, 0, 0, after)), "b h (c l) d -> b h c l d", c=n_blocks)
    k, v = (
        F.pad(t, (0, 0, missing, after)).unfold(2, block + window - 1, block).mT for t in (k, v)
    )

    query = torch.arange(block, device=q.device).unsqueeze(-1)
    key = torch.arange(block + window - 1, device=q.device)
    band = (query <= key) & (key < query + window)
    start = torch.arange(0, n_blocks * block, block, device=q.device).view(-1, 1, 1)
    return WindowBlocks(q, k, v, band & (start + key >= missing))


def joined(blocks: Float[Tensor, "b h c l m"], length: int) -> Float[Tensor, "b h n m"]:
    """The sequence of `length` positions that was cut into blocks."""
    return rearrange(blocks, "b h c l m -> b h (c l) m")[:, :, :length]
