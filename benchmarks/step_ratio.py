"""How many times as fast the compiled loop draws as PyTorch's own steps, in turn in one process.

    python benchmarks/step_ratio.py [--model default|paper] [--batch 1 16 64] [--steps 56]

The test suite runs a short form, so that drawing does not become slow unnoticed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from omegaconf import OmegaConf  # noqa: E402

from imagegen.cli.entry import compose  # noqa: E402
from imagegen.core.spec import ImageSpec  # noqa: E402
from imagegen.generation.decode import choose_decoder  # noqa: E402
from imagegen.generation.sampling_loop import continue_sequences  # noqa: E402
from imagegen.generation.sampling_request import SamplingRequest, no_gradients  # noqa: E402
from imagegen.heads.controls import Controls  # noqa: E402
from imagegen.model.transformer import ImageTransformer  # noqa: E402

SPEC = ImageSpec(28, 28)
"""Of MNIST."""


def preset(name: str) -> ImageTransformer:
    """A model of `conf/model` for images of 28 by 28 pixels, untrained."""
    config: Any = OmegaConf.to_container(compose("train", [f"model={name}"]), resolve=False)
    model = {**config["model"], "attention": config["attention"], "head": config["head"]}
    del model["conditional"]
    torch.manual_seed(0)
    return ImageTransformer.from_options(SPEC, **model).eval()


def times(
    model: ImageTransformer, batch: int, steps: int, repeats: int, precision: str = "auto"
) -> dict[str, list[float]]:
    """Seconds for the last `steps` steps of `batch` images, drawn by each of the two, in turn.

    Args:
        model: one that has a compiled loop.
    """
    loops = {
        "compiled": choose_decoder(model, Controls(), precision),
        "PyTorch": None,
    }
    if loops["compiled"] is None:
        raise ValueError("the model has no compiled loop")
    streams = [(image, 0) for image in range(batch)]
    prefix = np.random.default_rng(0).integers(
        0, model.spec.levels, (batch, model.raster.length - steps, model.raster.values_per_step)
    )
    spent: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(repeats + 1):
        for name, decoder in loops.items():
            request = SamplingRequest(0, Controls(), None, None, decoder)
            with no_gradients(model):
                parameters, state = model.prefill(torch.from_numpy(prefix.astype(np.uint8)))
                started = time.perf_counter()
                continue_sequences(model, parameters, state, streams, request)
                if turn:  # the first one warms up
                    spent[name].append(time.perf_counter() - started)
    return spent


def ratio(spent: dict[str, list[float]]) -> float:
    """Of the medians: above 1 where the compiled loop is faster."""
    return statistics.median(spent["PyTorch"]) / statistics.median(spent["compiled"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=56)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    model = preset(options.model)
    for batch in options.batch:
        spent = times(model, batch, options.steps, options.repeats, options.precision)
        lines = []
        for name, seconds in spent.items():
            per_step = sorted(1e3 * s / options.steps for s in seconds)
            lines.append(
                f"{name} {statistics.median(per_step):.3f} ms per step "
                f"({per_step[0]:.3f} to {per_step[-1]:.3f})"
            )
        print(f"batch {batch}: {', '.join(lines)}; ratio {ratio(spent):.1f}", flush=True)


if __name__ == "__main__":
    main()
