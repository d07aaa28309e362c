"""Choices that no mechanism can take are refused in one sentence, through `train.py` as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from imagegen.attention.base import CausalAttention
from imagegen.cli.entry import PROJECT_ROOT
from imagegen.core.build import build
from imagegen.core.errors import UserError
from tests.helpers import SMALL, run_train

# The mechanism, what is typed besides (SMALL has a head_dim of 8), and the sentence. How a command
# is refused does not depend on the option; all the others are built below.
TYPED = [
    ("softmax", "+attention.window=8", "does not know window"),
    ("hybrid", "attention.pattern=[nope]", "holds nope, which names no mechanism; choose from"),
]


@pytest.mark.parametrize(("name", "typed", "sentence"), TYPED)
def test_impossible_choices_end_a_command_with_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    typed: str,
    sentence: str,
) -> None:
    run = tmp_path / "run"
    options = [*SMALL, f"attention={name}", *typed.split(), f"hydra.run.dir={run}"]
    assert run_train(monkeypatch, *options) == 1
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sentence in error
    assert not run.exists()


# Options that differ from the mechanism's yaml; head_dim is 8.
OPTIONS = [
    ("linear", {"feature_map": "nope"}, "choose one of elu, relu"),
    ("linear", {"feature_map": 3}, "LinearAttention takes feature_map as a word, not 3"),
    ("linear", {"n_features": 8}, "for favor and fourier only"),
    ("linear", {"feature_map": "favor", "n_features": 0}, "n_features=0 must be at"),
    ("linear", {"feature_map": "favor", "n_features": 2.5}, "as a whole number or null, not 2.5"),
    ("linear", {"feature_map": "fourier", "n_features": 7}, "n_features=7 must be even"),
    ("linear", {"chunk_size": 0}, "chunk_size=0 must be at least 1"),
    ("linear", {"chunk_size": "many"}, "takes chunk_size as a whole number, not 'many'"),
    ("linear", {"chunk_size": True}, "takes chunk_size as a whole number, not True"),
    ("linear", {"eps": -1}, "eps=-1 must be above 0"),
    ("linear", {"eps": float("nan")}, "eps=nan must be above 0"),
    ("softmax", {"head_dim": 0}, "head_dim=0 must be at least 1"),
    ("softmax", {"head_dim": 2.5}, "takes head_dim as a whole number or null, not 2.5"),
    ("softmax", {"n_heads": 3}, "n_heads=3 does not divide d_model=16"),
    ("local", {"window": 0}, "window=0 must be at least 1"),
    ("local", {"window": -3}, "window=-3 must be at least 1"),
    ("local", {"window": 2.5}, "takes window as a whole number, not 2.5"),
    ("strided", {"n_heads": 1}, "needs n_heads of at least 2"),
    ("strided", {"combine": "nope"}, "choose one of heads, merged, interleaved"),
    ("strided", {"stride": 0}, "stride=0 must be at least 1"),
    ("strided", {"stride": "wide"}, "takes stride as a whole number or null, not 'wide'"),
    ("lsh", {"rounds": 0}, "rounds=0 must be at least 1"),
    ("lsh", {"n_buckets": 3}, "n_buckets=3 must be an even number"),
    ("lsh", {"chunk_size": 20}, "chunk_size=20 must be a multiple of 16"),
    ("lsh", {"hash_seed": -1}, "hash_seed=-1 must be at least 0"),
    ("retention", {"head_dim": 5}, "head_dim=5 must be even for attention.rotary=true"),
    ("retention", {"expand_v": 0}, "makes 0 features"),
    ("retention", {"expand_v": 0.3}, "makes 2.4 features"),
    ("retention", {"expand_v": float("nan")}, "makes nan features"),
    ("retention", {"expand_v": float("inf")}, "makes inf features"),
    ("retention", {"chunk_size": 48}, "chunk_size=48 must be a power of two"),
    ("retention", {"norm_eps": 0}, "norm_eps=0 must be above 0"),
    ("retention", {"rotary": "yes"}, "takes rotary as true or false, not 'yes'"),
    ("ssd", {"conv_size": -1}, "conv_size=-1 must be at least 1, or 0"),
    ("ssd", {"d_state": 0}, "d_state=0 must be at least 1"),
    ("ssd", {"expand": -1}, "makes -8 features"),
    ("ssd", {"dt_min": 0}, "dt_min=0 must be above 0"),
    ("gla", {"chunk_size": 0}, "chunk_size=0 must be a power of two"),
    ("gla", {"expand_k": 0.1}, "makes 0.8 features"),
    ("gla", {"gate_rank": 0}, "gate_rank=0 must be at least 1"),
    ("gla", {"gate_temperature": 0}, "gate_temperature=0 must be above 0"),
    ("gla", {"norm_eps": -1}, "norm_eps=-1 must be above 0"),
    ("delta", {"expand_v": 0}, "expand_v=0 times head_dim=8 must be a whole number"),
    ("delta", {"expand_v": float("inf")}, "must be a whole number"),
    ("delta", {"conv_size": -1}, "conv_size=-1"),
    ("delta", {"chunk_size": 0}, "chunk_size=0 must be a power of two"),
    ("gated_delta", {"gate": "nope"}, "gate=nope is unknown; choose one of head, channel"),
    ("gated_delta", {"expand_v": "wide"}, "takes expand_v as a number or null, not 'wide'"),
    ("hybrid", {"pattern": []}, "must list at least one mechanism"),
    ("hybrid", {"pattern": "linear"}, "must list at least one mechanism"),
    ("hybrid", {"pattern": 3}, "must list at least one mechanism"),
    ("hybrid", {"pattern": {"name": "local"}}, "must list at least one mechanism"),
    ("hybrid", {"pattern": ["hybrid"]}, "holds hybrid, which names no mechanism"),
    ("hybrid", {"pattern": [["linear"]]}, "names no mechanism"),
    ("hybrid", {"pattern": [{"window": 3}]}, "names no mechanism"),
    ("hybrid", {"pattern": [{"name": "local", "window": 0}]}, "window=0 must be at least 1"),
    ("hybrid", {"pattern": [{"name": "local", "windw": 3}]}, "does not know windw"),
    (
        "hybrid",
        {"pattern": [{"name": "local", "window": "wide"}]},
        "takes window as a whole number",
    ),
]


@pytest.mark.parametrize(("name", "changed", "sentence"), OPTIONS)
def test_impossible_options_are_refused(name: str, changed: dict[str, Any], sentence: str) -> None:
    options = yaml.safe_load((PROJECT_ROOT / "conf" / "attention" / f"{name}.yaml").read_text())
    sizes = {"d_model": 16, "n_heads": 2}
    with pytest.raises(UserError) as refused:
        build({**sizes, **options, **changed}, CausalAttention)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
