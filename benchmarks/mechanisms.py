"""Trains every attention mechanism in the default model and tables what comes out.

    python benchmarks/mechanisms.py speed digits --out FOLDER     (on an idle machine)
    python benchmarks/mechanisms.py train digits --out FOLDER
    python benchmarks/mechanisms.py table digits --out FOLDER

`speed` times training steps and generation of all mechanisms in turn, in one process. `train` runs
train.py and imagegen.evaluate for each mechanism and seed. Digits get the default number of epochs.
MNIST gets the number of steps that fit into ten minutes at the speed that `speed` measured, so that
the result does not depend on what else the machine does meanwhile; `speed` comes first there.
Finished runs are kept, so that an interrupted call goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
BUDGET = 600.0  # seconds of training steps on MNIST
MAPS = ("elu", "relu", "polynomial2", "taylor2", "favor", "fourier", "learned")
LINEAR = {f"linear-{name}": ["attention=linear", f"attention.feature_map={name}"] for name in MAPS}
LSH = {f"lsh-{rounds}": ["attention=lsh", f"attention.rounds={rounds}"] for rounds in (1, 4)}


def _local_hybrid(window: int) -> list[str]:
    return ["attention=hybrid", f"attention.pattern=[linear,{{name:local,window:{window}}}]"]


TABLES: dict[str, dict[str, list[str]]] = {
    "digits": {
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
    "mnist": {
        "softmax": ["attention=softmax"],
        "linear-elu": LINEAR["linear-elu"],
        "linear-favor": LINEAR["linear-favor"],
        **LSH,
        "gla": ["attention=gla"],
        "gated_delta": ["attention=gated_delta"],
        "hybrid linear local (window 64)": _local_hybrid(64),
    },
}
SEEDS = {"digits": (0, 1), "mnist": (0,)}
BASE: dict[str, list[str]] = {
    "digits": [],
    "mnist": ["experiment=mnist_cpu", "trainer.max_time=null"],
}
IMAGES = {"digits": None, "mnist": 2000}  # test images scored


def _data(table: str) -> list[str]:
    root = os.environ.get("IMAGEGEN_SHARED_DATA")
    if table == "digits" or root is None:
        return []
    return [f"dataset.root={root}", "dataset.download=false"]


def _plain(name: str) -> str:
    """The name as part of a file name that needs no quoting."""
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def speed(table: str, out: Path, rounds: int) -> None:
    """Seconds a training step and images/s when generating: medians over interleaved rounds."""
    import torch
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from imagegen.build import build
    from imagegen.cli import compose
    from imagegen.data.base import ImageDataset
    from imagegen.generate import generate
    from imagegen.model import ImageTransformer
    from imagegen.model_options import model_options

    made: dict[str, Any] = {}
    for name, overrides in TABLES[table].items():
        cfg = compose("train", [*BASE[table], *_data(table), *overrides, "logger=none"])
        config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=False)  # type: ignore[assignment]
        dataset = build(config["dataset"], ImageDataset)
        torch.manual_seed(0)
        model = ImageTransformer(
            dataset.spec,
            **model_options(config, dataset),
        )
        made[name] = (model, instantiate(cfg.optimizer)(model.parameters()), cfg.batch_size)
    images = torch.from_numpy(dataset.split("train").images[:256])
    steps: dict[str, list[float]] = {name: [] for name in made}
    drawn: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(rounds + 1):
        for name, (model, optimizer, batch_size) in made.items():
            for index in range(3):
                started = time.perf_counter()
                optimizer.zero_grad()
                model.bits_per_dim(images[index * batch_size :][:batch_size]).mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if turn:  # the first round warms up
                    steps[name].append(time.perf_counter() - started)
            if turn and turn <= (3 if table == "digits" else 1):
                started = time.perf_counter()
                next(generate(model, 64, batch_size=64))
                drawn[name].append(64 / (time.perf_counter() - started))
        print(f"round {turn} of {rounds}", file=sys.stderr)
    result = {
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "mechanisms": {
            name: {
                "seconds_a_step": statistics.median(steps[name]),
                "seconds_a_step_quartiles": statistics.quantiles(steps[name], n=4)[::2],
                "images_per_second": statistics.median(drawn[name]),
                "parameters": sum(p.numel() for p in made[name][0].parameters()),
                "batch_size": made[name][2],
            }
            for name in made
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{table}-speed.json").write_text(json.dumps(result, indent=2) + "\n")


def train(table: str, out: Path, jobs: int, only: str | None) -> None:
    """Train and score each mechanism, `jobs` at a time, each on its own share of the cores."""
    todo: Queue[tuple[str, int]] = Queue()
    names = [name for name in TABLES[table] if only is None or only in name]
    for seed in SEEDS[table]:
        for name in names:
            todo.put((name, seed))

    def worker(core: int) -> None:
        while not todo.empty():
            _train_one(table, out, *todo.get(), core if jobs > 1 else None)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(worker, range(jobs)))


def _train_one(table: str, out: Path, name: str, seed: int, core: int | None) -> None:
    folder = out / f"{table}-{_plain(name)}-seed{seed}"
    if (folder / "test.json").exists():
        return
    limits = []
    if table == "mnist":
        measured = json.loads((out / "mnist-speed.json").read_text())["mechanisms"][name]
        steps = round(BUDGET / measured["seconds_a_step"])
        limits = [f"trainer.max_steps={steps}", "trainer.limit_val_batches=0"]
        limits += ["trainer.val_check_interval=null", "callbacks.grids=null"]
    environment = dict(os.environ)
    pinned = []
    if core is not None:
        environment["OMP_NUM_THREADS"] = "1"
        pinned = ["taskset", "-c", str(core)]
    overrides = [*BASE[table], *_data(table), *TABLES[table][name], *limits, f"seed={seed}"]
    overrides += ["logger=csv", f"hydra.run.dir={folder}"]
    resume = [f"resume={folder}"] if (folder / "checkpoints/last.ckpt").exists() else []
    commands = [
        [sys.executable, "train.py", *overrides, *resume],
        [sys.executable, "-m", "imagegen.evaluate", f"ckpt={folder}", "split=test"]
        + [f"out={folder / 'test.json'}", "device=cpu"]
        + ([] if IMAGES[table] is None else [f"limit={IMAGES[table]}"]),
    ]
    for command in commands:
        done = subprocess.run(
            [*pinned, *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            print(f"{name}, seed {seed}: {done.stderr[-2000:]}", file=sys.stderr)
            return
    print(f"{time.strftime('%H:%M:%S')} {name}, seed {seed}: {done.stdout.strip()}", flush=True)


def table_of(table: str, out: Path) -> str:
    """The results as a Markdown table."""
    measured = json.loads((out / f"{table}-speed.json").read_text())["mechanisms"]
    seeds = SEEDS[table]
    head = ["mechanism", *(f"test bits/dim, seed {seed}" for seed in seeds), "steps"]
    head += ["ms a step", "images/s generating", "parameters"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in TABLES[table]:
        cells = [name]
        steps = ""
        for seed in seeds:
            folder = out / f"{table}-{_plain(name)}-seed{seed}"
            if not (folder / "test.json").exists():
                cells.append("not run")
                continue
            test = json.loads((folder / "test.json").read_text())
            steps = f"{json.loads((folder / 'summary.json').read_text())['steps']:,}"
            cells.append(f"{test['bits_per_dim']:.4f} ± {test['standard_error']:.4f}")
        speeds = measured[name]
        cells += [steps, f"{1000 * speeds['seconds_a_step']:.0f}"]
        cells += [f"{speeds['images_per_second']:.1f}", f"{speeds['parameters']:,}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["speed", "train", "table"])
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--rounds", type=int, default=5, help="of `speed`")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one core each")
    parser.add_argument("--only", help="mechanisms whose name contains this")
    options = parser.parse_args()
    out = options.out.absolute()
    if options.what == "speed":
        speed(options.table, out, options.rounds)
    elif options.what == "train":
        train(options.table, out, options.jobs, options.only)
    else:
        print(table_of(options.table, out))


if __name__ == "__main__":
    main()
