from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.curves import WINDOW, curve_of, write_curves


def test_curves_count_time_and_images_by_steps(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    lines = [f"{10 * i + 9},{3 - i / WINDOW}," for i in range(2 * WINDOW + 3)]
    lines.insert(5, "54,,1.5")
    metrics.write_text("step,train/bits_per_dim,val/bits_per_dim\n" + "\n".join(lines) + "\n")
    curve = curve_of(metrics, "ours", 0, {"seconds_a_step": 0.5, "batch_size": 8})
    middles = [10 * (WINDOW + 1) / 2, 10 * (3 * WINDOW + 1) / 2]
    assert curve.seconds == [0.5 * m for m in middles]
    assert curve.images == [8 * m for m in middles]
    assert curve.bits_per_dim == pytest.approx([2.525, 1.525])

    pytest.importorskip("matplotlib")
    write_curves([curve, curve._replace(seed=1)], tmp_path / "new" / "mnist-curves")
    written = json.loads((tmp_path / "new" / "mnist-curves.json").read_text())
    assert [each["seed"] for each in written] == [0, 1]
    assert (tmp_path / "new" / "mnist-curves.png").read_bytes().startswith(b"\x89PNG")
