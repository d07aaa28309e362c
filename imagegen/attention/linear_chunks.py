"""Causal linear attention in chunks, with a backward pass that keeps little.

Kept are features, values, outputs and normalisers of all positions and one state a chunk. Autograd
by itself would keep the scores as well, and several copies of queries, keys and values.

Axes: `b` batch, `n` position, `h` head, `c` chunk, `g` a chunk of a head of an image, in the order
"(b h c)", `l` position inside a chunk, `d` query/key feature, `m` value feature.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

# 1 MiB in float32, which processors hold in their caches.
SCORES_AT_A_TIME = 2**18


class LinearChunks(torch.autograd.Function):
    """Eq. 9 of Katharopoulos et al. (2020), y_i = phi(q_i)^T S_i / phi(q_i)^T z_i, over chunks.

    Takes contiguous features and values, S and z before the first position, `eps` and `floor` as
    in `linear.chunked_linear_attention`; for keys with scales also these, the largest up to each
    position (`now`) and before each chunk (`entry`), all of which count as constants.

    Returns y, the normalisers, and S and z after the last position. It has no second derivatives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "g l d"],
        k: Float[Tensor, "g l d"],
        v: Float[Tensor, "g l m"],
        s: Float[Tensor, "b h d m"],
        z: Float[Tensor, "b h d"],
        eps: float,
        floor: float | None,
        scale: Float[Tensor, "g l"] | None = None,
        now: Float[Tensor, "g l"] | None = None,
        entry: Float[Tensor, " g"] | None = None,
    ) -> tuple[
        Float[Tensor, "b n h m"],
        Float[Tensor, "g l"],
        Float[Tensor, "b h d m"],
        Float[Tensor, "b h d"],
    ]:
        enter, leave, decay = _factors(scale, now, entry)
        k_out = k if leave is None else k * leave
        s_before, s = _states(k_out.mT @ v, s, decay)
        z_before, z = _states(k_out.sum(dim=-2), z, decay)
        del k_out
        numerator, normalizer = torch.empty_like(v), v.new_empty(v.shape[:2])
        for part in _parts(q):
            q_in = q[part] if enter is None else q[part] * enter[part]
            scores = _scores(q, k, scale, now, part)
            torch.bmm(scores, v[part], out=numerator[part])
            numerator[part].baddbmm_(q_in, s_before[part])
            normalizer[part] = scores.sum(dim=-1)
            normalizer[part] += (q_in @ z_before[part].unsqueeze(-1)).squeeze(-1)
        # The outputs are laid out in memory as the next layer needs them.
        b, h = z.shape[:2]
        y = v.new_empty(b, len(v) // (b * h) * v.shape[1], h, v.shape[2])
        by_chunks = _by_chunks(y, v.shape[1])
        divisor = _divisor(normalizer, eps, floor).view(by_chunks.shape[:-1]).unsqueeze(-1)
        torch.div(numerator.view(by_chunks.shape), divisor, out=by_chunks)
        ctx.save_for_backward(q, k, v, y, normalizer, s_before, z_before, scale, now, entry)
        ctx.eps, ctx.floor = eps, floor
        ctx.mark_non_differentiable(normalizer)
        return y, normalizer, s, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(gradients[0].device.type, enabled=False):
            return _backward(ctx, *gradients)


def _backward(ctx: Any, dy: Tensor, _: Tensor, ds: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, y, normalizer, s_before, z_before, scale, now, entry = ctx.saved_tensors
    enter, leave, decay = _factors(scale, now, entry)
    divisor = _divisor(normalizer, ctx.eps, ctx.floor)

    # y = top / bottom. The gradient of t is called dt.
    dbottom = _by_chunks((dy * y).sum(dim=-1), q.shape[1]).reshape(divisor.shape)
    dbottom = dbottom.div_(divisor).neg_()
    if ctx.floor is not None:
        dbottom.masked_fill_(normalizer < ctx.floor, 0)
    dy = _by_chunks(dy, q.shape[1])
    dtop = torch.empty_like(v)
    torch.div(dy, divisor.view(dy.shape[:-1]).unsqueeze(-1), out=dtop.view(dy.shape))

    q_in = q if enter is None else q * enter
    ds_after, ds = _states(q_in.mT @ dtop, ds, decay, backwards=True)
    dz_after, dz = _states((dbottom.unsqueeze(-2) @ q_in).squeeze(-2), dz, decay, backwards=True)
    del q_in

    dq, dk = torch.empty_like(q), torch.empty_like(k)
    for part in _parts(q):
        scores = _scores(q, k, scale, now, part)
        k_out = k[part] if leave is None else k[part] * leave[part]
        dv = torch.bmm(scores.mT, dtop[part]).baddbmm_(k_out, ds_after[part])

        bottom = dbottom[part].unsqueeze(-1)
        dscores = torch.baddbmm(bottom, dtop[part], v[part].mT).tril_()
        if scale is not None:
            dscores *= _relative(scale, now, part)
        from_state = torch.baddbmm(
            bottom * z_before[part].unsqueeze(-2), dtop[part], s_before[part].mT
        )
        to_state = torch.baddbmm(dz_after[part].unsqueeze(-2), v[part], ds_after[part].mT)
        if enter is not None and leave is not None:
            from_state *= enter[part]
            to_state *= leave[part]
        torch.baddbmm(from_state, dscores, k[part], out=dq[part])
        torch.baddbmm(to_state, dscores.mT, q[part], out=dk[part])
        # From here on it holds dv.
        dtop[part] = dv
    return dq, dk, dtop, ds, dz, None, None, None, None, None


def _parts(q: Tensor) -> Iterator[slice]:
    """Slices of "g" that have so many scores together."""
    size = max(1, SCORES_AT_A_TIME // q.shape[1] ** 2)
    return (slice(start, start + size) for start in range(0, len(q), size))


def _scores(q: Tensor, k: Tensor, scale: Tensor | None, now: Tensor | None, part: slice) -> Tensor:
    scores = (q[part] @ k[part].mT).tril_()
    if scale is not None and now is not None:
        scores *= _relative(scale, now, part)
    return scores


def _relative(scale: Tensor, now: Tensor, part: slice) -> Tensor:
    """Factors of the scores; clamped for the later positions alone, which are masked."""
    return (scale[part].unsqueeze(-2) - now[part].unsqueeze(-1)).clamp_(max=0).exp_()


def _factors(
    scale: Tensor | None, now: Tensor | None, entry: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    """Factors of queries that read a state, of keys that add to one, and of the state itself."""
    if scale is None or now is None or entry is None:
        return None, None, None
    end = now[:, -1]
    enter = (entry.unsqueeze(-1) - now).exp().unsqueeze(-1)
    leave = (scale - end.unsqueeze(-1)).exp().unsqueeze(-1)
    return enter, leave, (entry - end).exp()


def _divisor(normalizer: Tensor, eps: float, floor: float | None) -> Tensor:
    return normalizer + eps if floor is None else normalizer.clamp(min=floor)


def _by_chunks(t: Float[Tensor, "b n h ..."], size: int) -> Float[Tensor, "b h c l ..."]:
    """The same memory in another order."""
    t = t.unflatten(1, (-1, size))
    return t.permute(0, 3, 1, 2, *range(4, t.dim()))


def _states(
    added: Float[Tensor, "g ..."],
    first: Float[Tensor, "b h ..."],
    decay: Float[Tensor, " g"] | None,
    backwards: bool = False,
) -> tuple[Float[Tensor, "g ..."], Float[Tensor, "b h ..."]]:
    """S or z before each chunk and after the last one; `backwards`, from the last one on."""
    b_h = first.shape[:2]
    added = added.unflatten(0, (*b_h, -1))
    if decay is None:
        ordered = added.flip(2) if backwards else added
        before = torch.cat([first.unsqueeze(2), ordered[:, :, :-1]], dim=2).cumsum_(dim=2)
        last = before[:, :, -1] + ordered[:, :, -1]
        before = before.flip(2) if backwards else before
    else:
        decay = decay.view(*added.shape[:3], *(1 for _ in added.shape[3:]))
        before, last = torch.empty_like(added), first
        chunks = range(added.shape[2])
        for c in reversed(chunks) if backwards else chunks:
            before[:, :, c] = last
            last = last * decay[:, :, c] + added[:, :, c]
    return before.flatten(0, 2), last
