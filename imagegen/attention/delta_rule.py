"""The delta rule and its gated forms: a fast weight that is corrected, not only added to.

With the state S as "d m" (the transpose of the papers' S for the first two), a key k of length one,
a value v, a writing strength beta and a decay alpha:

- S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T: the delta rule (Schlag et al., 2021);
- S_t = (I - beta_t k_t k_t^T) alpha_t S_{t-1} + beta_t k_t v_t^T: gated, alpha one number per head
  (Yang, Kautz and Hatamizadeh, 2025, eq. 10);
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
from torch.utils.checkpoint import checkpoint

from imagegen.attention.base import DEFAULT_CHUNK
from imagegen.attention.decay import decayed_scores, segment_sums


def chunked_delta_rule(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n m"],
    beta: Float[Tensor, "b h n"],
    log_decay: Float[Tensor, "b h n a"] | None,
    s: Float[Tensor, "b h d m"],
    chunk_size: int = DEFAULT_CHUNK,
) -> tuple[Float[Tensor, "b h n m"], Float[Tensor, "b h d m"]]:
    """The delta rule over a sequence, in chunks (Yang et al., 2024, sections 3.1 and 3.2).

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
        chunk_size: the longest chunk, a power of two.

    Returns:
        The outputs and the state after the last position.
    """
    length = q.shape[2]
    chunk = min(chunk_size, 2 ** (length - 1).bit_length())
    n_chunks = math.ceil(length / chunk)
    # Padding writes nothing (beta and k are 0) and forgets nothing (the logarithm is 0).
    padding = (0, 0, 0, n_chunks * chunk - length)

    def chunks(t: Tensor) -> Tensor:
        return rearrange(F.pad(t, padding), "b h (c l) f -> b h c l f", c=n_chunks)

    q, k, v, beta = chunks(q), chunks(k), chunks(v), chunks(beta.unsqueeze(-1))
    if log_decay is None:
        k_by_k, q_by_k = k @ k.mT, (q @ k.mT).tril()
        q_from_start, k_from_start, k_to_end = q, k, k
        chunk_decay = k.new_ones(1, 1, n_chunks, 1, 1)
    else:
        log_decay = chunks(log_decay)
        if log_decay.shape[-1] == 1:
            products = _scalar_products(q, k, log_decay)
        elif torch.is_grad_enabled():
            # It passes through log2(chunk) decayed copies of q and k, which are made again for the
            # backward pass rather than kept.
            products = checkpoint(
                _channel_products, q, k, log_decay, use_reentrant=False, preserve_rng_state=False
            )
        else:
            products = _channel_products(q, k, log_decay)
        k_by_k, q_by_k, from_start, to_end = products
        decay = from_start.exp()
        q_from_start, k_from_start, k_to_end = q * decay, k * decay, k * to_end.exp()
        chunk_decay = decay[:, :, :, -1].unsqueeze(-1)

    # Transposed, the solver takes the matrices in their memory layout. It reads one triangle only.
    written, erased = torch.linalg.solve_triangular(
        (beta * k_by_k).mT,
        (beta * torch.cat([v, k_from_start], dim=-1)).mT,
        upper=True,
        left=False,
        unitriangular=True,
    ).mT.split([v.shape[-1], k.shape[-1]], dim=-1)

    outputs = []
    # unbind: its gradient is one stack, that of indexing would be a full tensor for each chunk.
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


def _scalar_products(q: Tensor, k: Tensor, log_decay: Tensor) -> tuple[Tensor, ...]:
    """k_r^T G_ri k_i and q_r^T G_ri k_i for i <= r, and the sums from the start and to the end."""
    levels, from_start, to_end = segment_sums(log_decay)
    ones = torch.ones_like(log_decay)
    decay = decayed_scores(ones, ones, levels)
    return k @ k.mT * decay, q @ k.mT * decay, from_start, to_end


def _channel_products(q: Tensor, k: Tensor, log_decay: Tensor) -> tuple[Tensor, ...]:
    """The same where a decay differs between the features."""
    levels, from_start, to_end = segment_sums(log_decay)
    return decayed_scores(k, k, levels), decayed_scores(q, k, levels), from_start, to_end
