"""Trains every attention mechanism in the default model and tables what comes out.

    python benchmarks/mechanisms.py speed digits --out FOLDER     (on an idle machine)
    python benchmarks/mechanisms.py train digits --out FOLDER
    python benchmarks/mechanisms.py table digits --out FOLDER

Digits get the default number of epochs, MNIST the number of steps that fit into ten minutes at the
speed that `speed` measured; see `trainings.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.trainings import Table, main

MAPS = ("elu", "relu", "polynomial2", "taylor2", "favor", "fourier", "learned")
LINEAR = {f"linear-{name}": ["attention=linear", f"attention.feature_map={name}"] for name in MAPS}
LSH = {f"lsh-{rounds}": ["attention=lsh", f"attention.rounds={rounds}"] for rounds in (1, 4)}


def _local_hybrid(window: int) -> list[str]:
    return ["attention=hybrid", f"attention.pattern=[linear,{{name:local,window:{window}}}]"]


TABLES = {
    "digits": Table(
        {
            "softmax": ["attention=softmax"],
            **LINEAR,
            **{f"{name}, 4 buckets": [*o, "attention.n_buckets=4"] for name, o in LSH.items()},
            "local (window 16)": ["attention=local", "attention.window=16"],
            "strided": ["attention=strided"],
            "retention": ["attention=retention"],
            "ssd": ["attention=ssd"],
            "gla": ["attention=gla"],
            "delta": ["attention=delta"],
            "gated_delta": ["attention=gated_delta"],
            "gated_delta, gate=channel": ["attention=gated_delta", "attention.gate=channel"],
            "hybrid linear linear softmax": ["attention=hybrid"],
            "hybrid linear local (window 16)": _local_hybrid(16),
        },
        seeds=(0, 1),
    ),
    "mnist": Table(
        {
            "softmax": ["attention=softmax"],
            "linear-elu": LINEAR["linear-elu"],
            "linear-favor": LINEAR["linear-favor"],
            **LSH,
            "gla": ["attention=gla"],
            "gated_delta": ["attention=gated_delta"],
            "hybrid linear local (window 64)": _local_hybrid(64),
        },
        base=(
            "dataset=mnist",
            "optimizer.lr=0.002",
            "batch_size=16",
            "eval_batch_size=64",
            "trainer.max_epochs=-1",
        ),
        budget=600.0,
        images=2000,
        root="IMAGEGEN_SHARED_DATA",
    ),
}

if __name__ == "__main__":
    main(TABLES, str(__doc__).splitlines()[0])
