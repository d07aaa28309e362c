"""The delta rule and its gated forms: a fast weight that is corrected, not only added to.

With the state S as "d m" (the transpose of the papers' S for the first two), a key k of length one,
a value v, a writing strength beta and a decay alpha:

- S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T: the delta rule (Schlag et al., 2021);
- S_t = (I - beta_t k_t k_t^T) alpha_t S_{t-1} + beta_t k_t v_t^T: gated, alpha one number a head
  (Yang, Kautz and Hatamizadeh, 2024, eq. 10);
- S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T: alpha one number a feature
  of the key (Kimi Linear, 2025, eq. 1).

The output is o_t = S_t^T q_t.

Axes: `b` batch, `n` position, `h` head, `d` query/key feature, `m` value feature, `a` decays of a
head (1 or d), `c` chunk, `l` position inside a chunk.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

DEFAULT_CHUNK = 64


def chunked_delta_rule(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n m"],
    beta: Float[Tensor, "b h n"],
    log_decay: Float[Tensor, "b h n a"] | None,
    s: Float[Tensor, "b h d m"],
    chunk_size: int = DEFAULT_CHUNK,
) -> tuple[Float[Tensor, "b h n m"], Float[Tensor, "b h d m"]]:
    """The delta rule over a sequence, in chunks (Yang et al., 2024, section 3).

    Within a chunk that starts from S_0, let G_ri = prod_{i<j<=r} alpha_j and G_r that from the
    chunk's start. Every state is a decayed S_0 and a sum of outer products (the WY representation),

        S_r = G_r S_0 + sum_{i<=r} G_ri k_i u_i^T,

    with the values u that are really written. Put into the recurrence, they solve a triangular
    system (the UT transform):

        (I + A) U = diag(beta) (V - K_G S_0),   A_ri = beta_r k_r^T G_ri k_i for i < r,

    K_G having the rows G_r k_r. Both parts of its right side are solved for all chunks at once, and
    only S_0 passes from chunk to chunk. Time and memory are linear in `n`, and one state a chunk is
    kept for the backward pass. Decays enter as exp of sums of logarithms, none of them above zero,
    so nothing overflows however strong they are.

    Args:
        q, k: queries and keys, keys of length one at most.
        v: values.
        beta: writing strengths, 0 to 1.
        log_decay: logarithms of the decays, zero at most; None for no decay.
        s: state before the first position.
        chunk_size: the longest chunk; the sequence is cut evenly into chunks no longer than this.
            For decays of every feature (a > 1) chunks are as long as a power of two.

    Returns:
        The outputs and the state after the last position.
    """
    length = q.shape[2]
    n_chunks = math.ceil(length / chunk_size)
    chunk = math.ceil(length / n_chunks)
    if log_decay is not None and log_decay.shape[-1] > 1:
        chunk = min(_power_of_two_from(chunk), _power_of_two_to(chunk_size))
        n_chunks = math.ceil(length / chunk)
    # Padding writes nothing (beta and k are 0) and forgets nothing (the logarithm is 0).
    padding = (0, 0, 0, n_chunks * chunk - length)

    def chunks(t: Tensor) -> Tensor:
        return rearrange(F.pad(t, padding), "b h (c l) f -> b h c l f", c=n_chunks)

    q, k, v, beta = chunks(q), chunks(k), chunks(v), chunks(beta.unsqueeze(-1))
    if log_decay is None:
        k_by_k, q_by_k = (k @ k.mT).tril(-1), (q @ k.mT).tril()
        k_from_start = k_to_end = k
        q_from_start = q
        chunk_decay = k.new_ones(1, 1, n_chunks, 1, 1)
    else:
        products = _scalar_products if log_decay.shape[-1] == 1 else _channel_products
        k_by_k, q_by_k, from_start, to_end = products(q, k, chunks(log_decay))
        # The decays from the start of the chunk up to a position, and from there to its end.
        decay = from_start.exp()
        q_from_start, k_from_start, k_to_end = q * decay, k * decay, k * to_end.exp()
        chunk_decay = decay[:, :, :, -1].unsqueeze(-1)

    written, erased = torch.linalg.solve_triangular(
        beta * k_by_k,
        beta * torch.cat([v, k_from_start], dim=-1),
        upper=False,
        unitriangular=True,
    ).split([v.shape[-1], k.shape[-1]], dim=-1)

    outputs = []
    # unbind, for its gradient is one stack: that of indexing would be a full tensor for each chunk.
    parts = (written, erased, q_from_start, q_by_k, k_to_end, chunk_decay)
    for w, e, q_in, scores, k_out, decay in zip(*(t.unbind(dim=2) for t in parts), strict=True):
        u = w - e @ s
        outputs.append(q_in @ s + scores @ u)
        s = decay * s + k_out.mT @ u
    y = rearrange(torch.stack(outputs, dim=2), "b h c l m -> b h (c l) m")[:, :, :length]
    return y, s


def recurrent_delta_rule(
    q: Float[Tensor, "b h d"],
    k: Float[Tensor, "b h d"],
    v: Float[Tensor, "b h m"],
    beta: Float[Tensor, "b h"],
    log_decay: Float[Tensor, "b h a"] | None,
    s: Float[Tensor, "b h d m"],
) -> tuple[Float[Tensor, "b h m"], Float[Tensor, "b h d m"]]:
    """One step: decay the state, write what it lacks of the value, read it.

    Without gradients the memory of `s` is used again.
    """
    in_place = not torch.is_grad_enabled()
    if log_decay is not None:
        decay = log_decay.exp().unsqueeze(-1)
        s = s.mul_(decay) if in_place else s * decay
    found = (k.unsqueeze(-2) @ s).squeeze(-2)
    key, written = k.unsqueeze(-1), (beta.unsqueeze(-1) * (v - found)).unsqueeze(-2)
    s = s.addcmul_(key, written) if in_place else s + key * written
    return (q.unsqueeze(-2) @ s).squeeze(-2), s


def _power_of_two_from(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _power_of_two_to(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _scalar_products(
    q: Float[Tensor, "b h c l d"],
    k: Float[Tensor, "b h c l d"],
    log_decay: Float[Tensor, "b h c l 1"],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Products of the positions of a chunk under a decay a head; see `_channel_products`.

    The logarithms between two positions are summed, and not found as a difference of sums from the
    start: after a strong decay that difference has lost its digits.
    """
    chunk = log_decay.shape[-2]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=k.device).tril(-1)
    # Column i holds the logarithms after position i, summed down to row r.
    between = torch.where(later, log_decay, 0).cumsum(dim=-2).exp()
    k_by_k = (k @ k.mT * between).tril(-1)
    q_by_k = (q @ k.mT * between).tril()
    return k_by_k, q_by_k, log_decay.cumsum(dim=-2), _sum_after(log_decay)


def _channel_products(
    q: Float[Tensor, "b h c l d"],
    k: Float[Tensor, "b h c l d"],
    log_decay: Float[Tensor, "b h c l d"],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Products of the positions of a chunk under a decay of every feature.

    The decay between two positions no longer factors out of their product, and exp of sums from the
    start cannot be divided without overflow. So blocks are joined in pairs, from single positions
    up to the chunk: between the halves of a block the decay is that from the key to the middle
    times that from the middle to the query, both at most one.

    Returns:
        k_r^T G_ri k_i for i < r and q_r^T G_ri k_i for i <= r ("b h c l l"), the sum of the
        logarithms from the start of the chunk up to each position, and that after it to the end
        ("b h c l d").
    """
    up_to, after = log_decay, torch.zeros_like(log_decay)
    # The products of a block with itself, "b h c blocks size size".
    k_by_k = torch.zeros_like(k[..., :1, None])
    q_by_k = (q * k).sum(dim=-1)[..., None, None]
    for size in (2**level for level in range(k.shape[-2].bit_length() - 1)):
        (first_up_to, second_up_to), (first_after, second_after), (_, q_half), (k_first, k_half) = (
            rearrange(t, "b h c (p two l) f -> b h c p two l f", two=2, l=size).unbind(dim=4)
            for t in (up_to, after, q, k)
        )
        keys, decay = (k_first * first_after.exp()).mT, second_up_to.exp()
        k_by_k = _joined(k_by_k, (k_half * decay) @ keys)
        q_by_k = _joined(q_by_k, (q_half * decay) @ keys)
        first_total, second_total = first_up_to[..., -1:, :], second_up_to[..., -1:, :]
        up_to = torch.cat([first_up_to, first_total + second_up_to], dim=-2).flatten(3, 4)
        after = torch.cat([first_after + second_total, second_after], dim=-2).flatten(3, 4)
    return k_by_k.squeeze(3), q_by_k.squeeze(3), up_to, after


def _joined(
    blocks: Float[Tensor, "b h c blocks l l"], below: Float[Tensor, "b h c pairs l l"]
) -> Tensor:
    """Lower triangular blocks joined in pairs; `below` is what stands below the first of a pair."""
    first, second = blocks.unflatten(3, (-1, 2)).unbind(dim=4)
    first = F.pad(first, (0, first.shape[-1]))
    return torch.cat([first, torch.cat([below, second], dim=-1)], dim=-2)


def _sum_after(log_decay: Float[Tensor, "b h c l a"]) -> Tensor:
    """Sum of what follows each position of its chunk."""
    return F.pad(log_decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(dim=-2).flip(-2)
