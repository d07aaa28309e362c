"""`softmax` and `local` beside PyTorch's own attention, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from imagegen.attention.local import LocalAttention
from imagegen.attention.softmax import SoftmaxAttention
from tests.peers import (
    D_MODEL,
    N_HEADS,
    Result,
    assert_same,
    inputs,
    layer,
    linear,
    projections,
    result,
    stepped,
)

LENGTHS = [1, 63, 130]


def _theirs(module: SoftmaxAttention | LocalAttention, x: Tensor, mask: Tensor) -> Result:
    """PyTorch's reference of scaled dot product attention between our projections."""
    *qkv, out = projections(module)
    q, k, v = (one(x).unflatten(-1, (N_HEADS, -1)).transpose(1, 2) for one in qkv)
    with sdpa_kernel(SDPBackend.MATH):
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return result(out(y.transpose(1, 2).flatten(2)), x, [qkv, [out]])


@pytest.mark.parametrize("length", LENGTHS)
def test_softmax_is_scaled_dot_product_attention(length: int) -> None:
    module, x = layer(SoftmaxAttention), inputs(length)
    theirs = _theirs(module, x, torch.ones(length, length, dtype=torch.bool).tril())
    ours = [[module.qkv], [module.out]]
    assert_same(result(module(x)[0], x, ours), theirs, 1e-12, 1e-12)
    y = stepped(module.step, x, module.initial_state(len(x)))
    assert_same(result(y, x, ours), theirs, 1e-12, 1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_softmax_is_multi_head_attention(length: int) -> None:
    module, x = layer(SoftmaxAttention), inputs(length)
    theirs = nn.MultiheadAttention(D_MODEL, N_HEADS, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(module.qkv.weight)
        theirs.in_proj_bias.copy_(module.qkv.bias)
    theirs.out_proj = linear(module.out.weight, module.out.bias)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    y, _ = theirs(x, x, x, attn_mask=later, need_weights=False)
    torch.testing.assert_close(module(x)[0], y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [1, 5, 64])
@pytest.mark.parametrize("length", LENGTHS)
def test_local_is_scaled_dot_product_attention_with_a_band(length: int, window: int) -> None:
    module, x = layer(LocalAttention, window=window), inputs(length)
    band = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
    theirs = _theirs(module, x, band)
    ours = [[module.qkv], [module.out]]
    assert_same(result(module(x)[0], x, ours), theirs, 1e-12, 1e-12)
    y = stepped(module.step, x, module.initial_state(len(x)))
    assert_same(result(y, x, ours), theirs, 1e-12, 1e-12)
