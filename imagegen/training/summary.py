"""What a training run says about itself: at its start, at its end, and in `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, Timer
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table
from rich.text import Text

from imagegen.core.durations import format_seconds
from imagegen.core.installation import typed
from imagegen.core.machine import Choice
from imagegen.core.override_syntax import argument, shown
from imagegen.core.words import counted
from imagegen.data.base import SPLIT_NAMES, ImageDataset
from imagegen.training.callbacks import Rates


def summarize(
    trainer: Trainer, folder: Path, parameters: int, state: str, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """What `summary.json` holds; `state` is running, finished, interrupted or failed."""
    summary: dict[str, Any] = {
        "state": state,
        "best_bits_per_dim": None,
        "best_checkpoint": None,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "seconds": 0.0,
        "images_per_second": None,
        "parameters": parameters,
        "processes": trainer.world_size,
        "stopped_early": why_stopped(trainer),
        "machine": dict(machine),
    }
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and callback.monitor:
            if callback.best_model_score is not None:
                best = Path(callback.best_model_path)
                summary["best_bits_per_dim"] = float(callback.best_model_score)
                inside = best.is_relative_to(folder)
                summary["best_checkpoint"] = str(best.relative_to(folder) if inside else best)
        elif isinstance(callback, Timer):
            summary["seconds"] = round(callback.time_elapsed(), 1)
        elif isinstance(callback, Rates) and callback.images_per_second > 0:
            summary["images_per_second"] = round(callback.images_per_second, 1)
    return summary


@rank_zero_only
def say_what(
    cfg: DictConfig,
    dataset: ImageDataset,
    parameters: int,
    folder: Path,
    trainer: Trainer,
    precision: Choice,
    threads: Choice,
) -> None:
    """Print what is about to be trained, where, and what was decided about this machine."""
    spec = dataset.spec
    attention = str(cfg.attention.get("_target_")).rpartition(".")[2]
    print(
        f"{dataset.name}: {spec.height}x{spec.width}x{spec.channels}, {spec.levels} levels; "
        f"{attention}, {cfg.model.n_layers} layers x {cfg.model.d_model}, "
        f"{parameters / 1e6:.2f} M parameters"
    )
    counts = (f"{len(dataset.split(name)):,} {name}" for name in SPLIT_NAMES)
    print(f"images: {', '.join(counts)}{_left_out(dataset)}")
    device = trainer.strategy.root_device
    print(f"on {device}, {precision}")
    if device.type == "cpu":
        print(f"threads {threads}")
    if trainer.world_size > 1:
        images = cfg.batch_size * trainer.world_size * trainer.accumulate_grad_batches
        print(f"{trainer.world_size} processes, {images} images per step")
    print(f"run folder: {shown(folder)}", flush=True)


def _left_out(dataset: ImageDataset) -> str:
    """The files of a data set that are not read, the most frequent kinds first."""
    kinds = sorted(dataset.left_out.items(), key=lambda kind: (-kind[1], kind[0]))
    texts = [
        f"{count:,} {'file' if count == 1 else 'files'} {suffix or 'without a suffix'}"
        for suffix, count in kinds
    ]
    return f"; left out: {', '.join(texts)}" if texts else ""


@rank_zero_only
def say_result(summary: Mapping[str, Any], folder: Path) -> None:
    """Print the result as a table, and the commands to type next."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    best = summary["best_bits_per_dim"]
    rows = {
        "best validation": "none" if best is None else f"{best:.4f} bits/dim",
        "best checkpoint": summary["best_checkpoint"] or "none",
        "steps": f"{summary['steps']:,} in {counted(summary['epochs'], 'epoch')}",
        "time": format_seconds(summary["seconds"]),
        "parameters": f"{summary['parameters']:,}",
        "run folder": shown(folder),
    }
    if summary.get("stopped_early"):
        rows["ended early"] = summary["stopped_early"]
    for name, value in rows.items():
        table.add_row(name, Text(value))  # not a string, in which rich reads [brackets] as markup
    Console().print(table)
    run = argument("ckpt", folder)
    if not (folder / "checkpoints").is_dir():
        return
    print(
        "next:\n"
        f"  {typed('sample')} {run} n=64\n"
        f"  {typed('sample')} {run} task=complete\n"
        f"  {typed('evaluate')} {run} split=test"
    )


@rank_zero_only
def say_tried(batches: int) -> None:
    """Print that a try of some batches, which keeps nothing, went well."""
    print(
        f"tried {batches} {'batch' if batches == 1 else 'batches'} of training and of validation "
        "without an error; nothing is kept (trainer.fast_dev_run)"
    )


def why_stopped(trainer: Trainer) -> str | None:
    """Why early stopping has ended the run; None if it has not."""
    messages = [callback.stopping_reason_message for callback in trainer.early_stopping_callbacks]
    said = next((message for message in messages if message), None)
    return said and said.removesuffix(". Signaling Trainer to stop.")


def limits(cfg: DictConfig) -> str:
    """The limits of a run, as they are typed."""
    names = ("max_epochs", "max_steps", "max_time")
    return ", ".join(
        f"trainer.{name}={cfg.trainer[name]}"
        for name in names
        if cfg.trainer.get(name) not in (None, -1)
    )
