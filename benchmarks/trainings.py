"""Trains the rows of a table at equal time, and tables what comes out; see `mechanisms.py`.

`speed` times training steps and generation of all rows in turn, in one process. `train` runs
train.py and imagegen evaluate for each row and seed. A row gets the number of steps that fit into
the table's budget at the speed that `speed` measured, so that the result does not depend on what
else the machine does meanwhile; `speed` comes first there. Finished runs are kept, so that an
interrupted call continues where it was.
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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Table:
    """What is trained.

    Attributes:
        rows: options of train.py by the name of the row.
        base: options of all rows, before their own.
        budget: seconds of training steps; None: as long as the options say.
        seeds: of each row, or of those rows that `fewer` does not name.
        fewer: seeds of rows that have others.
        split: that is scored: test, or val for choosing settings.
        images: how many of its images; None for all.
        draws: images drawn at a time when generation is timed; 0: it is not.
        root: environment variable that may name the folder of the data; see `dataset.root`.
    """

    rows: Mapping[str, list[str]]
    base: tuple[str, ...] = ()
    budget: float | None = None
    seeds: tuple[int, ...] = (0,)
    fewer: Mapping[str, tuple[int, ...]] | None = None
    split: str = "test"
    images: int | None = None
    draws: int = 64
    root: str | None = None

    def seeds_of(self, row: str) -> tuple[int, ...]:
        """The seeds that a row is trained with."""
        return (self.fewer or {}).get(row, self.seeds)

    def options_of(self, row: str) -> list[str]:
        """The options of a row."""
        root = None if self.root is None else os.environ.get(self.root)
        data = [] if root is None else [f"dataset.root={root}"]
        return [*self.base, *data, *self.rows[row]]


def _prepared(table: Table, row: str) -> tuple[Any, Any, Any]:
    """The module of a row, its optimizer and the images of three batches."""
    import torch
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from imagegen.cli.entry import compose
    from imagegen.core.build import build
    from imagegen.data.base import ImageDataset
    from imagegen.model.transformer import ImageTransformer
    from imagegen.training.model_options import model_options
    from imagegen.training.module import ImageModule
    from imagegen.training.optimizers import build_optimizer

    cfg = compose("train", [*table.options_of(row), "logger=none"])
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=False)  # type: ignore[assignment]
    dataset = build(config["dataset"], ImageDataset)
    dataset.prepare()
    images = torch.from_numpy(dataset.split("train").images[: 3 * cfg.batch_size].copy())
    torch.manual_seed(0)
    model = ImageTransformer.from_options(dataset.spec, **model_options(config, dataset))
    optimizer = instantiate(cfg.optimizer)
    return ImageModule(model, optimizer), build_optimizer(optimizer, model), images


def speed(name: str, table: Table, out: Path, rounds: int) -> None:
    """Seconds of a training step and images/s when generating: medians over interleaved rounds."""
    import torch

    from imagegen.core.machine import has_bf16
    from imagegen.core.memory import keep_freed_memory
    from imagegen.generation.sampling_loop import generate

    keep_freed_memory()  # as train.py does, as is the precision
    bf16 = has_bf16(torch.device("cpu"))
    made = {row: _prepared(table, row) for row in table.rows}
    steps: dict[str, list[float]] = {row: [] for row in made}
    drawn: dict[str, list[float]] = {row: [] for row in made}
    for turn in range(rounds + 1):
        for row, (module, optimizer, images) in made.items():
            model = module.model
            for batch in images.chunk(3):
                started = time.perf_counter()
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = module.loss({"images": batch})
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if turn:  # the first round warms up
                    steps[row].append(time.perf_counter() - started)
            if table.draws and turn <= (3 if model.raster.length <= 64 else 1):
                started = time.perf_counter()
                next(generate(model, table.draws, batch_size=table.draws))
                if turn:
                    drawn[row].append(table.draws / (time.perf_counter() - started))
        print(f"round {turn} of {rounds}", file=sys.stderr)
    result = {
        "threads": torch.get_num_threads(),
        "precision": "bf16-mixed" if bf16 else "32-true",
        "rounds": rounds,
        "mechanisms": {
            row: {
                "seconds_a_step": statistics.median(steps[row]),
                "seconds_a_step_quartiles": statistics.quantiles(steps[row], n=4)[::2],
                "images_per_second": statistics.median(drawn[row]) if drawn[row] else None,
                "parameters": sum(p.numel() for p in made[row][0].parameters()),
                "batch_size": len(made[row][2]) // 3,
            }
            for row in made
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}-speed.json").write_text(json.dumps(result, indent=2) + "\n")


def train(name: str, table: Table, out: Path, jobs: int, only: str | None) -> None:
    """Train and score each row, `jobs` at a time, each on its own share of the cores."""
    todo: Queue[tuple[str, int]] = Queue()
    rows = [row for row in table.rows if only is None or only in row]
    # All rows with their first seed come before any second one.
    for place in range(max(len(table.seeds_of(row)) for row in rows)):
        for row in rows:
            for seed in table.seeds_of(row)[place : place + 1]:
                todo.put((row, seed))

    def worker(core: int) -> None:
        while not todo.empty():
            _train_one(name, table, out, *todo.get(), core if jobs > 1 else None)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(worker, range(jobs)))


def folder_of(out: Path, name: str, row: str, seed: int) -> Path:
    """The run folder of a row, whose name needs no quoting."""
    plain = re.sub(r"[^a-z0-9]+", "-", row.lower()).strip("-")
    return out / f"{name}-{plain}-seed{seed}"


def _train_one(name: str, table: Table, out: Path, row: str, seed: int, core: int | None) -> None:
    folder = folder_of(out, name, row, seed)
    if (folder / "test.json").exists():
        return
    limits = []
    if table.budget is not None:
        measured = json.loads((out / f"{name}-speed.json").read_text())["mechanisms"][row]
        steps = round(table.budget / measured["seconds_a_step"])
        limits = [f"trainer.max_steps={steps}", "trainer.limit_val_batches=0"]
        limits += ["trainer.val_check_interval=null", "callbacks.grids=null"]
    environment = dict(os.environ)
    pinned = []
    if core is not None:
        environment["OMP_NUM_THREADS"] = "1"
        pinned = ["taskset", "-c", str(core)]
    overrides = [*table.options_of(row), *limits, f"seed={seed}"]
    overrides += ["logger=csv", f"hydra.run.dir={folder}", "resume=auto"]
    commands = [
        [sys.executable, "train.py", *overrides],
        [sys.executable, "-m", "imagegen", "evaluate", f"ckpt={folder}", f"split={table.split}"]
        + [f"out={folder / 'test.json'}", "device=cpu"]
        + ([] if table.images is None else [f"limit={table.images}"]),
    ]
    for command in commands:
        done = subprocess.run(
            [*pinned, *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode and "has already finished" not in done.stderr:
            print(f"{row}, seed {seed}: {done.stderr[-2000:]}", file=sys.stderr)
            return
    print(f"{time.strftime('%H:%M:%S')} {row}, seed {seed}: {done.stdout.strip()}", flush=True)


def table_of(name: str, table: Table, out: Path) -> str:
    """The results as a Markdown table."""
    measured = json.loads((out / f"{name}-speed.json").read_text())["mechanisms"]
    seeds = sorted({seed for row in table.rows for seed in table.seeds_of(row)})
    head = [name, *(f"{table.split} bits/dim, seed {seed}" for seed in seeds), "steps"]
    head += ["ms per step", "batch", "images/s generating", "parameters"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in table.rows:
        cells = [row]
        steps = ""
        for seed in seeds:
            folder = folder_of(out, name, row, seed)
            if seed not in table.seeds_of(row):
                cells.append("")
            elif not (folder / "test.json").exists():
                cells.append("not run")
            else:
                test = json.loads((folder / "test.json").read_text())
                steps = f"{json.loads((folder / 'summary.json').read_text())['steps']:,}"
                cells.append(f"{test['bits_per_dim']:.4f} ± {test['standard_error']:.4f}")
        speeds = measured[row]
        drawn = speeds["images_per_second"]
        cells += [steps, f"{1000 * speeds['seconds_a_step']:.0f}", str(speeds["batch_size"])]
        cells += ["" if drawn is None else f"{drawn:.1f}", f"{speeds['parameters']:,}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def curves(name: str, table: Table, out: Path) -> None:
    """Learning curves of the runs that are there, to `out`."""
    from benchmarks.curves import curve_of, write_curves

    measured = json.loads((out / f"{name}-speed.json").read_text())["mechanisms"]
    found = [
        curve_of(folder_of(out, name, row, seed) / "metrics.csv", row, seed, measured[row])
        for row in table.rows
        for seed in table.seeds_of(row)
        if (folder_of(out, name, row, seed) / "test.json").exists()
    ]
    write_curves(found, out / f"{name}-curves")


def main(tables: Mapping[str, Table], description: str) -> None:
    """The command line of a script that has tables."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("what", choices=["speed", "train", "table", "curves"])
    parser.add_argument("table", choices=sorted(tables))
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--rounds", type=int, default=5, help="of `speed`")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one core each")
    parser.add_argument("--only", help="rows whose name contains this")
    options = parser.parse_args()
    out, name = options.out.absolute(), options.table
    if options.what == "speed":
        speed(name, tables[name], out, options.rounds)
    elif options.what == "train":
        train(name, tables[name], out, options.jobs, options.only)
    elif options.what == "curves":
        curves(name, tables[name], out)
    else:
        print(table_of(name, tables[name], out))
