from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import imagegen.attention
from imagegen.attention.hybrid import HybridAttention
from imagegen.attention.linear import LinearAttention
from imagegen.attention.local import LocalAttention
from imagegen.attention.softmax import SoftmaxAttention
from imagegen.core.errors import UserError


def test_the_pattern_is_repeated_over_the_layers() -> None:
    layers = [HybridAttention(8, 2, layer=layer).mechanism for layer in range(5)]
    kinds = [LinearAttention, LinearAttention, SoftmaxAttention, LinearAttention, LinearAttention]
    assert [type(layer) for layer in layers] == kinds
    assert [layer.layer for layer in layers] == [0, 1, 2, 3, 4]


@torch.no_grad()
def test_the_state_of_a_layer_is_its_mechanisms_own() -> None:
    def sizes(layer: int) -> list[int]:
        module = HybridAttention(8, 2, layer=layer)
        states = [module(torch.randn(1, length, 8))[1] for length in (1, 64, 784)]
        return [sum(tensor.nbytes for tensor in state.tensors()) for state in states]

    assert len(set(sizes(0))) == len(set(sizes(1))) == 1
    assert sizes(2) == sorted(set(sizes(2)))


def test_entries_may_have_options() -> None:
    pattern = ["linear", {"name": "local", "window": 9}, {"name": "linear", "feature_map": "relu"}]
    local = HybridAttention(8, 2, pattern=pattern, layer=1, row_length=7).mechanism
    assert isinstance(local, LocalAttention)
    assert (local.window, local.row_length) == (9, 7)
    linear = HybridAttention(8, 2, 3, pattern=pattern, layer=5).mechanism
    features = linear.feature_map.queries(-torch.ones(1, 2, 1, 3))
    assert (features.max().item(), linear.head_dim) == (0.0, 3)


def test_a_mechanism_needs_no_registration(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "brand_new.py").write_text(
        "from imagegen.attention.linear import LinearAttention, LinearState\n"
        "class AttentionOfTomorrow(LinearAttention): pass\n"
    )
    monkeypatch.setattr(
        imagegen.attention, "__path__", [*imagegen.attention.__path__, str(tmp_path)]
    )
    try:
        found = HybridAttention(8, 2, pattern=["brand_new"]).mechanism
    finally:
        module: ModuleType = sys.modules.pop("imagegen.attention.brand_new")
        vars(imagegen.attention).pop("brand_new")
    assert type(found) is module.AttentionOfTomorrow


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ([], r"pattern=\[\] must list at least one"),
        ("linear", "pattern=linear must list at least one"),
        (
            ["linear", "sofmax"],
            "holds sofmax, which names no mechanism; choose from .*linear, local",
        ),
        (["linear", "hybrid"], "holds hybrid"),
        (["linear", "base"], "holds base"),
        (["linear", "feature_maps"], "holds feature_maps"),
        ([{"window": 3}], "which names no mechanism"),
        ([3], "holds 3"),
        ([None], "holds None"),
        ([{"name": "local", "windw": 3}], "LocalAttention does not know windw; .* window"),
        ([{"name": "local", "window": 0}], "window=0"),
    ],
)
def test_impossible_patterns_are_refused(pattern: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        HybridAttention(8, 2, pattern=pattern)


def test_the_names_that_are_offered_are_mechanisms() -> None:
    with pytest.raises(UserError) as refusal:
        HybridAttention(8, 2, pattern=["nothing"])
    offered = str(refusal.value).partition("choose from ")[2].partition(", or give")[0].split(", ")
    assert {"linear", "local", "lsh", "softmax", "strided"} <= set(offered)
    assert {"base", "buffers", "hybrid", "slots", "windows"}.isdisjoint(offered)
    for name in offered:
        HybridAttention(8, 2, pattern=[name])


@torch.no_grad()
def test_the_state_is_the_mechanisms_own() -> None:
    module = HybridAttention(8, 2, layer=2)
    y, state = module(torch.randn(2, 10, 8))
    assert y.shape == (2, 10, 8)
    assert type(state) is type(module.mechanism.initial_state(2))


def test_an_entry_that_no_layer_comes_to_is_refused_too() -> None:
    pattern = ["linear", "linear", {"name": "local", "window": 0}]
    with pytest.raises(UserError, match="window=0"):
        HybridAttention(16, 2, pattern=pattern, layer=0)
    torch.manual_seed(1)
    alone = HybridAttention(16, 2, pattern=["linear"], layer=0)
    torch.manual_seed(1)
    first = HybridAttention(16, 2, pattern=["linear", "gla"], layer=0)
    assert all(map(torch.equal, alone.state_dict().values(), first.state_dict().values()))
