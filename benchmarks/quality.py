"""Our default model against the paper's at equal time on two cores, and what its parts are worth.

    python benchmarks/quality.py speed tune-default --out FOLDER     (on an idle machine)
    python benchmarks/quality.py train tune-default --out FOLDER --jobs 2
    python benchmarks/quality.py table tune-default --out FOLDER

Settings are chosen by the `tune-` tables, on validation images; see `trainings.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.trainings import Table, main

MNIST = ("dataset=mnist", "trainer.max_epochs=-1", "eval_batch_size=64")
SMALL = ["model.n_layers=4", "model.d_model=128", "model.n_heads=4", "model.d_ff=512"]
PAPER = ["model=paper", *SMALL]
RATES = ("5e-4", "1e-3", "2e-3", "4e-3")


def _settings(options: list[str]) -> dict[str, list[str]]:
    """Learning rates at batch 16, and other batches at the middle one."""
    rows = {f"lr {lr}, batch 16": [*options, f"optimizer.lr={lr}"] for lr in RATES}
    for batch in (8, 32):
        rows[f"lr 2e-3, batch {batch}"] = [*options, "optimizer.lr=2e-3", f"batch_size={batch}"]
    return {row: [*rest, *_batch(row)] for row, rest in rows.items()}


def _batch(row: str) -> list[str]:
    return ["batch_size=16"] if row.endswith("batch 16") else []


PARTS = {
    "as it is": [],
    "convolution [2,2]": ["model.convolution=[2,2]"],
    "convolution [1,2]": ["model.convolution=[1,2]"],
    "averaged weights": ["callbacks.ema.decay=0.999"],
    "RMSNorm, gated": ["model.norm=rms", "model.gated=true", "model.activation=silu"],
    "residual scale 0.1": ["model.residual_scale=0.1"],
    "gla": ["attention=gla"],
    "hybrid linear local": [
        "attention=hybrid",
        "attention.pattern=[linear,{name:local,window:64}]",
    ],
}

TABLES = {
    "tune-default": Table(
        _settings(SMALL), MNIST, 300.0, split="val", images=1000, draws=0, places=True
    ),
    "tune-paper": Table(
        _settings(PAPER), MNIST, 300.0, split="val", images=1000, draws=0, places=True
    ),
    "parts": Table(
        {row: [*SMALL, "optimizer.lr=2e-3", "batch_size=16", *more] for row, more in PARTS.items()},
        MNIST,
        600.0,
        split="val",
        images=1000,
        places=True,
    ),
}

if __name__ == "__main__":
    main(TABLES, str(__doc__).splitlines()[0])
