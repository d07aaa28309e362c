"""`linear`, `favor`, `softmax` and `local` beside pytorch-fast-transformers, the authors' library.

Its compiled products, which its causal linear and its local attention need, know float32 only;
there our float64 is held against it, so that the differences are its rounding. Its step by step
forms and its full attention run in float64, and hold ours to that.

Its Favor takes each row of its matrix with both signs, has one matrix for all heads, and draws it
at every call, by a function that newer versions of PyTorch have removed. Both are given the same
rows here instead, and leave out eps, which they count in different units.

Its local attention sees `local_context // 2` positions back, and the mask hides those ahead. Not
compared: its `reformer`, which averages rounds instead of joining them, cuts and sorts otherwise,
and its clustered attentions, which are not causal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imagegen.attention.base import CausalAttention
from imagegen.attention.linear import LinearAttention
from imagegen.attention.local import LocalAttention
from imagegen.attention.softmax import SoftmaxAttention
from tests.peers import (
    D_MODEL,
    HEAD_DIM,
    N_HEADS,
    Result,
    assert_same,
    inputs,
    layer,
    peer,
    projections,
    result,
    stepped,
)

PACKAGE = "pytorch-fast-transformers"
attention = peer("fast_transformers.attention", PACKAGE)
feature_maps = peer("fast_transformers.feature_maps", PACKAGE)
masking = peer("fast_transformers.masking", PACKAGE)
recurrent = peer("fast_transformers.recurrent.attention", PACKAGE)

LENGTHS = [1, 64, 150]


class KeptFavor(feature_maps.Favor):  # type: ignore[misc]
    """Favor that does not draw its matrix again."""

    def new_feature_map(self, device: Any = None) -> None:
        pass


def _favor(module: LinearAttention) -> KeptFavor:
    """Theirs with half of our rows; ours gets these with both signs, the same for all heads."""
    omega = module.feature_map.omega
    rows = omega[0, : omega.shape[1] // 2].clone()
    omega.copy_(torch.cat([rows, -rows]).expand_as(omega))
    theirs = KeptFavor(HEAD_DIM, n_dims=omega.shape[1]).double()
    theirs.omega.copy_(rows.T)
    return theirs


def _linear(feature_map: str) -> tuple[LinearAttention, dict[str, Any]]:
    """Ours, and the options that make theirs the same."""
    if feature_map == "elu":
        return layer(LinearAttention), {}
    module = layer(LinearAttention, feature_map="favor", n_features=24)
    module.eps = 0.0  # no configuration may have it: a query that meets no key gives 0 / 0
    theirs = _favor(module)
    return module, {"feature_map": lambda _: theirs, "eps": 0.0}


def _with_projections(wrapper: type[nn.Module], inner: nn.Module, module: CausalAttention) -> Any:
    """Their layer around `inner` with our weights, and its linear layers in groups like ours."""
    theirs = wrapper(inner, D_MODEL, N_HEADS).double()
    q, k, v, out = projections(module)
    theirs.query_projection, theirs.key_projection, theirs.value_projection = q, k, v
    theirs.out_projection = out
    return theirs


def _groups(theirs: Any) -> list[list[nn.Linear]]:
    qkv = [theirs.query_projection, theirs.key_projection, theirs.value_projection]
    return [qkv, [theirs.out_projection]]


def _parallel(theirs: Any, x: Tensor) -> Result:
    causal = masking.TriangularCausalMask(x.shape[1])
    lengths = masking.LengthMask(torch.full((len(x),), x.shape[1]))
    return result(theirs(x, x, x, causal, lengths, lengths), x, _groups(theirs))


def _recurrent(theirs: Any, x: Tensor) -> Result:
    def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return theirs(x, x, x, state)

    return result(stepped(step, x, None), x, _groups(theirs))


def _both_of_ours(module: CausalAttention, x: Tensor) -> list[Result]:
    groups = [[module.qkv], [module.out]]
    steps = stepped(module.step, x, module.initial_state(len(x)))
    return [result(module(x)[0], x, groups), result(steps, x, groups)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("feature_map", ["elu", "favor"])
def test_linear_in_parallel(feature_map: str, length: int) -> None:
    module, options = _linear(feature_map)
    x = inputs(length)
    inner = attention.CausalLinearAttention(HEAD_DIM, **options)
    layer = _with_projections(attention.AttentionLayer, inner, module).float()
    theirs = _parallel(layer, x.detach().float().requires_grad_())
    for ours in _both_of_ours(module, x):
        assert_same(ours, theirs, 1e-5, 1e-5)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("feature_map", ["elu", "favor"])
def test_linear_step_by_step(feature_map: str, length: int) -> None:
    module, options = _linear(feature_map)
    x = inputs(length)
    inner = recurrent.RecurrentLinearAttention(HEAD_DIM, **options)
    theirs = _recurrent(_with_projections(recurrent.RecurrentAttentionLayer, inner, module), x)
    for ours in _both_of_ours(module, x):
        assert_same(ours, theirs, 1e-12, 1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_softmax(length: int) -> None:
    module, x = layer(SoftmaxAttention), inputs(length)
    full = attention.FullAttention(attention_dropout=0.0)
    steps = recurrent.RecurrentFullAttention(attention_dropout=0.0)
    theirs = [
        _parallel(_with_projections(attention.AttentionLayer, full, module), x),
        _recurrent(_with_projections(recurrent.RecurrentAttentionLayer, steps, module), x),
    ]
    for ours in _both_of_ours(module, x):
        for other in theirs:
            assert_same(ours, other, 1e-12, 1e-12)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", [2, 5, 64])
def test_local(window: int, length: int) -> None:
    module, x = layer(LocalAttention, window=window), inputs(length)
    inner = attention.LocalAttention(2 * window - 1, attention_dropout=0.0)
    layer_ = _with_projections(attention.AttentionLayer, inner, module).float()
    theirs = _parallel(layer_, x.detach().float().requires_grad_())
    for ours in _both_of_ours(module, x):
        assert_same(ours, theirs, 1e-5, 1e-5)
