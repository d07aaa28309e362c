"""The ways that `benchmarks/decoders.py` compares draw the same images."""

from __future__ import annotations

import pytest

from benchmarks import decoders
from imagegen.core.spec import ImageSpec
from imagegen.generation.sampling_request import no_gradients
from tests.helpers import tiny_model


@pytest.mark.slow  # exports, and compiles the loop
def test_every_way_draws_and_is_tabled(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    # It takes a C++ compiler and a minute.
    ways = {name: way for name, way in decoders.WAYS.items() if name != "torch.compile"}
    monkeypatch.setattr(decoders, "WAYS", {**ways, "none": lambda model: 1 / 0})
    model = tiny_model(ImageSpec(16, 16, 1, 256))
    with no_gradients(model):
        found = decoders.measured(model, [2], 8, 2)
    assert [row["way"] for row in found] == list(decoders.WAYS)
    *drawn, missing = found
    assert all(len(row["seconds"]) == 2 for row in drawn)
    exact = [row["images_as_pytorch"] for row in drawn if row["way"] != "compiled loop"]
    assert exact == [2, 2, 2]
    assert missing["not_measured"] == "ZeroDivisionError: division by zero"
    result = {
        "machine": {"processor": "abacus"},
        "threads": 1,
        "torch_version": "2",
        "onnxruntime_version": "1",
        "commit": "abc",
        "load_average": None,
        "models": {"tiny": found},
    }
    table = decoders.markdown(result)
    assert "| onnxruntime | " in table
    assert "Not measured: none (ZeroDivisionError: division by zero)." in table
