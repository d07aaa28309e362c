"""Causal linear attention as the recurrence that it is, for training and reading on a CPU.

Axes: `b` batch, `n` position, `h` head, `d` feature of a query or key, `m` of a value, as many.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from imagegen.attention.feature_maps import FUNCTIONS, FeatureMap, FunctionMap
from imagegen.core.compiled import load
from imagegen.core.machine import Choice

SHORTEST = 128
"""Positions from which loading the compiled loops pays, for any number of images: an image's result
does not depend on its company."""
VECTOR = 8
"""Features of a head are a multiple of this."""
CHUNKS = "chunks of PyTorch's operations"
DTYPES = (torch.float32, torch.bfloat16)


def takes(qkv: Float[Tensor, "b n three h d"], feature_map: FeatureMap) -> bool:
    """Whether `LinearScan` can and should replace the chunks; why compiled code is missing is said
    once.
    """
    return (
        type(qkv) is Tensor  # not a stand-in of a model that is traced
        and why_chunks(qkv.device, qkv.dtype, qkv.shape[4], feature_map) is None
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and _loops() is not None
    )


def why_chunks(
    device: torch.device, dtype: torch.dtype, features: int, feature_map: FeatureMap
) -> str | None:
    """Why `LinearScan` cannot replace the chunks, on any CPU; None where it can.

    Args:
        dtype: of queries, keys and values.
        features: of a head.
    """
    if device.type != "cpu":
        return f"on {device.type}"
    if dtype not in DTYPES:
        return f"in {str(dtype).removeprefix('torch.')}"
    if features % VECTOR:
        return f"heads of {features} features, not a multiple of {VECTOR}"
    if not isinstance(feature_map, FunctionMap) or feature_map.function not in _KNOWN:
        return f"another feature map than {' and '.join(_KNOWN.values())}"
    return None


_KNOWN = {FUNCTIONS[name]: name for name in ("relu", "elu")}


class LinearScan(torch.autograd.Function):
    """y_i = S_i^T phi(q_i) / (phi(q_i)^T z_i + eps) by eq. 16 to 20 of Katharopoulos et al. (2020).

    Where PyTorch multiplies chunks, this goes through the positions with the state of a head in the
    first cache, forwards and, for the gradients, once more in each direction. It keeps nothing for
    the backward pass but its inputs and the normalisers. Computed in float32, whatever is stored.

    Takes queries, keys and values before the feature map, S and z before the first position, `eps`
    and the map; returns y of the dtype of `qkv`, the normalisers before `eps`, and S and z after
    the last position. It has no second derivatives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Float[Tensor, "b n three h d"],
        s: Float[Tensor, "b h d m"],
        z: Float[Tensor, "b h d"],
        eps: float,
        feature_map: FunctionMap,
    ) -> tuple[
        Float[Tensor, "b n h m"],
        Float[Tensor, "b h n"],
        Float[Tensor, "b h d m"],
        Float[Tensor, "b h d"],
    ]:
        loops = _loops()
        assert loops is not None
        from imagegen.core.compiled.elementwise import FEATURE_MAPS

        kind = FEATURE_MAPS[_KNOWN[feature_map.function]]
        batch, length, _, heads, size = qkv.shape
        qkv = qkv.contiguous()
        y = qkv.new_empty(batch, length, heads, size)
        normalizer = z.new_empty(batch, heads, length)
        after, sums = (t.clone(memory_format=torch.contiguous_format) for t in (s, z))
        given = (_array(qkv), after.numpy(), sums.numpy(), np.float32(eps), kind)
        written = (_array(y), normalizer.numpy())
        _share(
            batch * heads,
            lambda first, stop: loops.forward(first, stop, *given, _work(4, size), *written),
        )
        ctx.save_for_backward(qkv, s, z, normalizer)
        ctx.eps, ctx.kind = eps, kind
        ctx.mark_non_differentiable(normalizer)
        return y, normalizer, after, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        loops = _loops()
        assert loops is not None
        dy, _, ds, dz = gradients
        qkv, s, z, normalizer = ctx.saved_tensors
        batch, _, _, heads, size = qkv.shape
        turned = s.mT.clone(memory_format=torch.contiguous_format)
        sums, dz = (t.clone(memory_format=torch.contiguous_format) for t in (z, dz))
        both = [t.clone(memory_format=torch.contiguous_format) for t in (ds, ds.mT)]
        dqkv, dbottom = torch.empty_like(qkv), torch.empty_like(normalizer)
        states = (turned.numpy(), sums.numpy(), *(t.numpy() for t in both), dz.numpy())
        given = (np.float32(ctx.eps), ctx.kind, normalizer.numpy(), _array(dy.contiguous()))
        written = (dbottom.numpy(), _array(dqkv))
        _share(
            batch * heads,
            lambda first, stop: loops.backward(
                first, stop, _array(qkv), *states, *given, _work(5, size), *written
            ),
        )
        return dqkv, both[0], dz, None, None


def _array(t: Tensor) -> np.ndarray:
    """The same memory; of bfloat16, its bits."""
    return (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).detach().numpy()


def _work(rows: int, size: int) -> np.ndarray:
    return np.empty((rows, size), dtype=np.float32)


def _share(heads: int, work: Callable[[int, int], None]) -> None:
    """Let PyTorch's number of threads do `work(first, stop)`, each for some of the heads."""
    count = max(1, min(torch.get_num_threads(), heads))
    bounds = [heads * part // count for part in range(count + 1)]
    own, *parts = itertools.pairwise(bounds)
    others = [_pool(count - 1).submit(work, *part) for part in parts]
    work(*own)
    for other in others:
        other.result()


@functools.lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="attention")


def machine_choice() -> Choice:
    """What goes through linear attention on this machine's CPU, and why."""
    try:
        load("imagegen.attention.linear_loops")
    except Exception as error:  # Numba missing, too old, or at odds with another package
        return Choice(CHUNKS, str(error))
    from imagegen.core.compiled import compile

    sets = compile.target().instruction_sets
    if not {"AVX2", "NEON"} & set(sets):
        return Choice(CHUNKS, "this CPU has neither AVX2 nor NEON")
    return Choice("compiled recurrence", f"compiled for {', '.join(sets)}")


@functools.cache
def _loops() -> Any:
    """The compiled functions; None where they cannot be had or would be slower than chunks."""
    choice = machine_choice()
    if choice.value != CHUNKS:
        return load("imagegen.attention.linear_loops")
    print(f"linear attention {choice}", file=sys.stderr)
    return None
