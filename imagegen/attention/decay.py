"""Linear attention whose state decays: S_t = diag(a_t) S_(t-1) + k_t v_t^T, o_t = q_t^T S_t.

Retention, SSD and gated linear attention differ in where a_t comes from. It is given as its
logarithm, one per head or one per feature, never positive. Sums of logarithms are built up from
shorter sums and never taken as differences of longer ones, so nothing is lost to cancellation,
every exponent is at most zero, and a decay of any strength ends as zero instead of overflowing.

Axes: `b` batch, `n` position, `h` head, `d` query/key feature, `m` value feature, `f` feature of
the decay (`d`, or 1 for a decay per head), `c` chunk, `l` position inside a chunk, `k` block of
positions, `s` position inside a block.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from imagegen.attention.base import DEFAULT_CHUNK


def chunked_decay_attention(
    q: Float[Tensor, " b #h n d"],
    k: Float[Tensor, " b #h n d"],
    v: Float[Tensor, "b h n m"],
    log_decay: Float[Tensor, "#b h n #d"],
    s: Float[Tensor, "b h d m"],
    chunk_size: int = DEFAULT_CHUNK,
) -> tuple[Float[Tensor, "b h n m"], Float[Tensor, "b h d m"]]:
    """All positions at once, in chunks.

    Inside a chunk the lower triangle of scores is formed; the chunks before it enter through S.
    Time and memory are linear in `n`, and one state a chunk is kept for the backward pass.

    Args:
        q, k: queries and keys; all heads share them where their `h` is 1.
        v: values.
        log_decay: log a_t, at most 0, of a head or of each of its features.
        s: S of the positions before the first one.
        chunk_size: the longest chunk, a power of two.

    Returns:
        The outputs, and S after the last position.
    """
    length = v.shape[2]
    chunk = min(chunk_size, 2 ** (length - 1).bit_length())
    n_chunks = math.ceil(length / chunk)
    # Positions past the end have no key, and a decay of one: they leave S as it is.
    padding = (0, 0, 0, n_chunks * chunk - length)
    q, k, v, log_decay = (
        rearrange(F.pad(t, padding), "b h (c l) f -> b h c l f", c=n_chunks)
        for t in (q, k, v, log_decay)
    )

    levels, from_start, to_end = segment_sums(log_decay)
    if log_decay.shape[-1] == 1:
        ones = torch.ones_like(log_decay)
        scores = (q @ k.mT) * decayed_scores(ones, ones, levels)
    else:
        scores = decayed_scores(q, k, levels)
    y_within = scores @ v

    # The loop keeps nothing for the backward pass but the states themselves.
    q_chunks = (q * from_start.exp()).unbind(2)
    k_chunks = (k * to_end.exp()).unbind(2)
    v_chunks = v.unbind(2)
    decays = from_start[..., -1, :].exp().unsqueeze(-1).unbind(2)
    y_before = []
    for index, decay in enumerate(decays):
        y_before.append(q_chunks[index] @ s)
        s = decay * s + k_chunks[index].mT @ v_chunks[index]
    y = y_within + torch.stack(y_before, dim=2)
    return rearrange(y, "b h c l m -> b h (c l) m")[:, :, :length], s


def recurrent_decay_attention(
    q: Float[Tensor, " b #h d"],
    k: Float[Tensor, " b #h d"],
    v: Float[Tensor, "b h m"],
    log_decay: Float[Tensor, "#b h #d"],
    s: Float[Tensor, "b h d m"],
) -> tuple[Float[Tensor, "b h m"], Float[Tensor, "b h d m"]]:
    """One step of the recurrence: update S (in place where no gradient is needed) and read."""
    decay = log_decay.exp().unsqueeze(-1)
    k, v = k.unsqueeze(-1), v.unsqueeze(-2)
    s = decay * s + k * v if torch.is_grad_enabled() else s.mul_(decay).addcmul_(k, v)
    return (q.unsqueeze(-2) @ s).squeeze(-2), s


def segment_sums(
    log_decay: Float[Tensor, "*any l f"],
) -> tuple[list[tuple[Tensor, Tensor]], Float[Tensor, "*any l f"], Float[Tensor, "*any l f"]]:
    """Sums of logarithms over the segments that chunked attention needs; `l` is a power of two.

    Blocks of 1, 2, 4, ... positions are joined in pairs. From position j of the first block of a
    pair to position i of the second, the decay runs from j to the end of the first block, then from
    the start of the second to i.

    Returns:
        For each size `s` of blocks, smallest first, two "... k s f", one entry a pair: the sums
        from the start of the second block to i, i included, and those after j to the end of the
        first block. Then the same two for the whole of `l`: from its start, and to its end.
    """
    from_start = log_decay.unsqueeze(-2)
    to_end = torch.zeros_like(from_start)
    levels = []
    while from_start.shape[-3] > 1:
        from_start_1, from_start_2 = _pairs(from_start)
        to_end_1, to_end_2 = _pairs(to_end)
        levels.append((from_start_2, to_end_1))
        total_1, total_2 = from_start_1[..., -1:, :], from_start_2[..., -1:, :]
        from_start = torch.cat([from_start_1, total_1 + from_start_2], dim=-2)
        to_end = torch.cat([to_end_1 + total_2, to_end_2], dim=-2)
    return levels, from_start.squeeze(-3), to_end.squeeze(-3)


def decayed_scores(
    q: Float[Tensor, "*any l d"],
    k: Float[Tensor, "*any l d"],
    levels: list[tuple[Tensor, Tensor]],
) -> Float[Tensor, "*any l l"]:
    """q_i^T diag(a_(j+1) ... a_i) k_j for j <= i, and 0 above the diagonal.

    This is the secondary chunking of gated linear attention carried to the end: each pair of blocks
    is one matrix product, and there is no tensor of a decay for every i, j and feature.

    Args:
        q, k: queries and keys.
        levels: what `segment_sums` says of the decays.
    """
    scores = (q * k).sum(dim=-1)[..., None, None]
    for size, (from_start, to_end) in ((level[0].shape[-2], level) for level in levels):
        _, q_second = _pairs(q.unflatten(-2, (-1, size)))
        k_first, _ = _pairs(k.unflatten(-2, (-1, size)))
        below = (q_second * from_start.exp()) @ (k_first * to_end.exp()).mT
        first, second = _pairs(scores)
        scores = torch.cat(
            [
                torch.cat([first, torch.zeros_like(below)], dim=-1),
                torch.cat([below, second], dim=-1),
            ],
            dim=-2,
        )
    return scores.squeeze(-3)


def _pairs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return first, second
