"""`favor` beside performer-pytorch, in float64, causal and with the same projection.

Its softmax kernel adds 1e-4 to every feature after taking the exponentials relative to their
largest, over the whole sequence for keys; ours adds nothing there. With that constant at 0, and eps
with it, the two are the same function. With the constant as it is they are not: the features of
most keys are far below 1e-4 of the largest one, and for these inputs the outputs differ by 13 % of
the largest, the gradients by 26 %.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn

from imagegen.attention.linear import LinearAttention
from tests.peers import (
    D_MODEL,
    HEAD_DIM,
    N_HEADS,
    assert_same,
    inputs,
    layer,
    peer,
    projections,
    result,
    stepped,
)

performer = peer("performer_pytorch.performer_pytorch", "performer-pytorch")
N_FEATURES = 24


def _pair() -> tuple[LinearAttention, Any]:
    module = layer(LinearAttention, feature_map="favor", n_features=N_FEATURES)
    module.eps = 0.0  # no configuration may have it: a query that meets no key gives 0 / 0
    theirs = performer.SelfAttention(
        D_MODEL, causal=True, heads=N_HEADS, dim_head=HEAD_DIM, nb_features=N_FEATURES
    ).double()
    theirs.to_q, theirs.to_k, theirs.to_v, theirs.to_out = projections(module)
    fast = theirs.fast_attention
    fast.causal_linear_fn = functools.partial(performer.causal_linear_attention_noncuda, eps=0.0)
    # All its heads share a projection.
    fast.projection_matrix.copy_(module.feature_map.omega[0])
    module.feature_map.omega.copy_(module.feature_map.omega[:1].clone())
    return module, theirs


def _groups(theirs: Any) -> list[list[nn.Linear]]:
    return [[theirs.to_q, theirs.to_k, theirs.to_v], [theirs.to_out]]


@pytest.mark.parametrize("length", [1, 64, 150])
def test_favor_without_added_constants(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    kernel = functools.partial(performer.softmax_kernel, eps=0.0)
    monkeypatch.setattr(performer, "softmax_kernel", kernel)
    module, layer_ = _pair()
    x = inputs(length)
    theirs = result(layer_(x), x, _groups(layer_))
    groups = [[module.qkv], [module.out]]
    assert_same(result(module(x)[0], x, groups), theirs, 1e-11, 1e-11)
    y = stepped(module.step, x, module.initial_state(len(x)))
    assert_same(result(y, x, groups), theirs, 1e-11, 1e-11)
