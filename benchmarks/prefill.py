"""How many times as fast a known prefix goes through the parallel form as step by step.

    python benchmarks/prefill.py [--model paper|default] [--batch 1 16] [--repeats 5]

All 784 positions of MNIST, the ways in turn, medians: the parallel form, PyTorch's steps, and the
compiled loop that draws.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.step_ratio import preset
from imagegen.generation.decode import parameters_as_drawn
from imagegen.model.transformer import ImageTransformer


def ways(model: ImageTransformer, batch: int) -> dict[str, Callable[[], object]]:
    """What takes in the values of `batch` images, by name."""
    rng = np.random.default_rng(0)
    shape = (batch, model.raster.length, model.raster.values_per_step)
    prefix = torch.from_numpy(rng.integers(0, model.spec.levels, shape).astype(np.uint8))

    def steps() -> None:
        _, state = model.step(None, model.initial_state(batch))
        for position in range(model.raster.length - 1):
            _, state = model.step(prefix[:, position], state)

    return {
        "parallel": lambda: model.prefill(prefix[:, :-1]),  # and the last step's distribution
        "PyTorch's steps": steps,
        "compiled steps": lambda: parameters_as_drawn(model, prefix, None, "auto"),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", choices=["paper", "default"], default="paper")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    model = preset(options.model)
    for batch in options.batch:
        spent: dict[str, list[float]] = {}
        with torch.inference_mode():
            for turn in range(options.repeats + 1):
                for name, way in ways(model, batch).items():
                    started = time.perf_counter()
                    way()
                    if turn:  # the first one warms up
                        spent.setdefault(name, []).append(time.perf_counter() - started)
        medians = {name: statistics.median(found) for name, found in spent.items()}
        for name, seconds in medians.items():
            print(
                f"{options.model}, batch {batch}, {name}: {seconds:.3f} s "
                f"({min(spent[name]):.3f} - {max(spent[name]):.3f}), "
                f"parallel is {seconds / medians['parallel']:.1f} times as fast"
            )


if __name__ == "__main__":
    main()
