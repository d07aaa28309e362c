"""The mechanisms that conf/attention/ offers, with variants of their options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagegen.attention.feature_maps import FEATURE_MAPS

CONF = Path(__file__).parents[2] / "conf" / "attention"
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "delta": [{}, {"conv_size": 0, "output_norm": False, "chunk_size": 8}, {"output_gate": True}],
    "gated_delta": [{}, {"gate": "channel"}, {"gate": "channel", "chunk_size": 8, "expand_v": 1.5}],
    "gla": [{}, {"expand_k": 1.0, "conv_size": 4, "gate_temperature": 0.02, "chunk_size": 32}],
    "hybrid": [{}, {"pattern": [{"name": "local", "window": 7}, "linear"]}],
    "linear": [
        *({"feature_map": name} for name in FEATURE_MAPS),
        {"chunk_size": 7, "qk_norm": True},
    ],
    "local": [{"window": 64}, {"window": 5, "qk_norm": True}],
    "lsh": [{"rounds": 1}, {"rounds": 4, "n_buckets": 4, "chunk_size": 32}],
    "retention": [{}, {"rotary": False, "conv_size": 3, "expand_v": 1.0, "chunk_size": 8}],
    "softmax": [{}, {"qk_norm": True}],
    "ssd": [{"d_state": 8}, {"d_state": 5, "conv_size": 0, "skip": False, "chunk_size": 16}],
    "strided": [{"combine": "heads"}, {"combine": "merged", "stride": 7}, {"stride": 1}],
}


def cases() -> Iterator[Any]:
    for path in sorted(CONF.glob("*.yaml")):
        for variant in VARIANTS.get(path.stem, [{}]):
            options = {**yaml.safe_load(path.read_text()), **variant}
            name = "-".join([path.stem, *(f"{key}:{value}" for key, value in variant.items())])
            yield pytest.param(options, id=name)
