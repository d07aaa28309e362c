"""Memory of past positions: a ring that keeps the last ones, a history that keeps all.

Axes: `b` batch, `h` head, `w` place in the ring, `n` position, `f` feature.
"""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn import functional as F

from imagegen.attention.base import Position

FIRST_CAPACITY = 64


def ring_in_order(ring: Shaped[Tensor, "b h w f"], length: int) -> Shaped[Tensor, "b h w f"]:
    """The last w of `length` positions, oldest first; those before position 0 are zeros.

    Position p is in place p % w of the ring, so that a new one overwrites the oldest.
    """
    return ring.roll(-(length % ring.shape[2]), dims=2)


def ring_after(
    ring: Shaped[Tensor, "b h w f"], new: Shaped[Tensor, "b h n f"], length: int
) -> Shaped[Tensor, "b h w f"]:
    """The ring in new memory after `new` positions, when it has seen `length` before."""
    places = ring.shape[2]
    last = torch.cat([ring_in_order(ring, length), new.to(ring.dtype)], dim=2)[:, :, -places:]
    return last.roll((length + new.shape[2]) % places, dims=2)


def ring_step(
    ring: Shaped[Tensor, "b h w f"], new: Shaped[Tensor, "b h 1 f"], length: Position
) -> Shaped[Tensor, "b h w f"]:
    """The ring after one position; in the same memory where no gradient is needed."""
    place = length % ring.shape[2]
    if torch.is_grad_enabled():
        here = torch.arange(ring.shape[2], device=ring.device) == place
        return torch.where(here.unsqueeze(-1), new.to(ring.dtype), ring)
    if isinstance(place, Tensor):
        # As an index in brackets it would be read back to the host, which no CUDA graph records.
        return ring.index_copy_(2, place.view(1), new.to(ring.dtype))
    ring[:, :, place] = new.squeeze(2)
    return ring


def history_step(
    history: Shaped[Tensor, "b h capacity f"], new: Shaped[Tensor, "b h 1 f"], length: int
) -> Shaped[Tensor, "b h larger f"]:
    """The history, whose first `length` places are taken, after one position.

    In the same memory where no gradient is needed and there is room.
    """
    if torch.is_grad_enabled():
        return torch.cat([history[:, :, :length], new.to(history.dtype)], dim=2)
    if length == history.shape[2]:
        # Doubling the allocation keeps the copying linear in the final length.
        history = F.pad(history, (0, 0, 0, max(length, FIRST_CAPACITY)))
    history[:, :, length] = new.squeeze(2)
    return history
