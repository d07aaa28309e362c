"""Runs to look at, as trainings leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from imagegen.tracking.metrics_file import MetricsFile

CONFIG: dict[str, Any] = {
    "seed": 0,
    "batch_size": 4,
    "resume": None,
    "dataset": {"_target_": "imagegen.data.mnist.MNIST", "root": "/somewhere"},
    "model": {"order": "raster", "convolution": [2, 2]},
    "attention": {
        "_target_": "imagegen.attention.linear.LinearAttention",
        "feature_map": "elu",
        "chunk_size": 64,
    },
    "optimizer": {"_target_": "torch.optim.SGD"},
    "trainer": {"devices": 1, "num_nodes": 1, "accumulate_grad_batches": 2},
    "callbacks": {"best": {"dirpath": "/here/checkpoints"}},
}
ROWS = [
    {"step": 9, "train/bits_per_dim": 3.0, "train/images_per_second": 40.0},
    {"step": 14, "val/bits_per_dim": 2.5},
    {"step": 19, "train/bits_per_dim": 2.0, "train/images_per_second": 20.0},
    {"step": 29, "train/bits_per_dim": 1.0, "train/images_per_second": 80.0},
    {"step": 29, "val/bits_per_dim": 1.25},
]


def make_run(
    folder: Path, rows: list[dict[str, Any]] = ROWS, summary: Any = None, **changed: Any
) -> Path:
    """The folder of a finished run of these rows in its metrics file."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **changed}, sort_keys=False))
    (folder / "summary.json").write_text(json.dumps({"state": "finished", **(summary or {})}))
    metrics = MetricsFile(folder)
    for row in rows:
        metrics.log_metrics({k: v for k, v in row.items() if k != "step"}, row["step"])
    metrics.finalize("success")
    return folder
