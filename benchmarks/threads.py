"""What threads cost that this machine does not have, and that wait for each other.

    python benchmarks/threads.py announced       # 64 threads announced on the usable CPUs
    python benchmarks/threads.py spinning        # how long a waiting thread spins, alone and busy

`announced` draws images and takes training steps in this process, in turn with as many threads as
there are usable CPUs and with 64 announced, as PyTorch announces in a container with a CPU limit.
`spinning` trains an epoch of digits in a process for each setting, in turn, alone and beside as
many busy loops as there are CPUs.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 5
SPIN_COUNTS = ("1000", "10000", "100000", "300000")  # the last is GNU OpenMP's own


def announced() -> None:
    """Print the medians, and the ratio of 64 threads to as many as there are CPUs."""
    import torch

    from imagegen.core.machine import prepare, usable_cpus
    from imagegen.core.spec import ImageSpec
    from imagegen.generation.sampling_loop import generate
    from imagegen.model.transformer import ImageTransformer

    attention = {"_target_": "imagegen.attention.linear.LinearAttention"}
    head = {"_target_": "imagegen.heads.mixture_of_logistics.MixtureOfLogistics"}
    embedding = {"_target_": "imagegen.model.embeddings.Neighbourhood"}
    model = ImageTransformer.from_options(
        ImageSpec(16, 16, 1),
        attention,
        head,
        embedding,
        n_layers=4,
        d_model=128,
        n_heads=4,
        d_ff=512,
    )
    images = torch.randint(0, 256, (32, 16, 16, 1), dtype=torch.uint8)

    def draw() -> None:
        list(generate(model, 64))

    def train() -> None:
        prepare()  # as every command does before its work
        model.bits_per_dim(images).mean().backward()

    def unlimited() -> None:
        model.bits_per_dim(images).mean().backward()

    works: dict[str, Callable[[], None]] = {
        "draw 64 images of 16x16": draw,
        "training step, batch 32": train,
        "training step, threads as announced": unlimited,
    }
    for name, work in works.items():
        seconds: dict[int, list[float]] = {usable_cpus(): [], 64: []}
        for repeat in range(REPEATS + 1):
            for threads, found in seconds.items():
                torch.set_num_threads(threads)
                start = perf_counter()
                work()
                if repeat:
                    found.append(perf_counter() - start)
        few, many = (statistics.median(found) for found in seconds.values())
        print(f"{name:36} {few:.3f} s, 64 announced {many:.3f} s, ratio {many / few:.2f}")


def spinning() -> None:
    """Print training images/s for each spin count of GNU OpenMP."""
    found: dict[tuple[str, str], list[float]] = {}
    for load in ("alone", "busy"):
        loops = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range(os.cpu_count() or 1)
            if load == "busy"
        ]
        try:
            for _ in range(3):
                for count in SPIN_COUNTS:
                    found.setdefault((load, count), []).append(_rate(count))
        finally:
            for loop in loops:
                loop.kill()
    for (load, count), rates in found.items():
        shown = ", ".join(f"{rate:.0f}" for rate in rates)
        print(f"{load:6} spin count {count:8} {statistics.median(rates):6.0f} images/s ({shown})")


def _rate(count: str) -> float:
    environment = {**os.environ, "GOMP_SPINCOUNT": count}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", "logger=none", "trainer=cpu", "callbacks.grids=null"]
        command += [
            "trainer.max_epochs=1",
            "trainer.limit_val_batches=1",
            f"hydra.run.dir={folder}/r",
        ]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
            )
        except subprocess.TimeoutExpired:
            return 0.0
    rate = re.search(r"([\d,]+) images/s", done.stdout)
    assert rate, done.stdout + done.stderr
    return float(rate[1].replace(",", ""))


if __name__ == "__main__":
    {"announced": announced, "spinning": spinning}[sys.argv[1]]()
