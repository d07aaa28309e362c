"""A training run: everything between a composed configuration and the run folder's summary."""

from __future__ import annotations

import io
import json
import logging
import shlex
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint, RichProgressBar, Timer
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from imagegen.build import build
from imagegen.callbacks import ExactSteps, Interruptible, Rates, format_seconds
from imagegen.checkpoint import KEY, make_metadata, read_resume_state
from imagegen.data.base import ImageDataset
from imagegen.data.datamodule import ImageDataModule
from imagegen.errors import UserError
from imagegen.loggers import build_loggers, close_loggers, logger_state
from imagegen.model import ImageTransformer
from imagegen.output import write_atomic
from imagegen.resume import claim_run_folder, quote
from imagegen.training import ImageModule


class AtomicCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name and renames it, so that none is ever half there.

    Lightning's own way renames files of some file systems only, and leaves a truncated one on a
    full disk.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save to `path`."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), buffer.getvalue())


class Metadata(Callback):
    """Puts into each checkpoint what sampling from it needs; see `imagegen.checkpoint`."""

    def __init__(self, metadata: Mapping[str, Any], dataset: ImageDataset) -> None:
        self.metadata = metadata
        self.dataset = dataset

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the entry."""
        names = self.dataset.class_names
        checkpoint[KEY] = {
            **self.metadata,
            "class_names": None if names is None else list(names),
            "logger": logger_state(trainer.loggers),
        }


def train(cfg: DictConfig) -> dict[str, Any]:
    """Train as configured; leaves checkpoints, pictures, metrics and a summary in the run folder.

    Returns:
        The summary, as written to `summary.json`.

    Raises:
        UserError: for a configuration that cannot be trained.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    with claim_run_folder(folder, resuming=cfg.resume is not None):
        return _train(cfg, folder, list(hydra.overrides.task))


def _train(cfg: DictConfig, folder: Path, overrides: list[str]) -> dict[str, Any]:
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    # The folder of a run that goes on holds its checkpoints.
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    # Lightning 2.6 asks torch's pytree in the old way; nothing that a user could mend.
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\).*")
    torch.set_float32_matmul_precision("high")
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    seed_everything(cfg.seed, workers=True, verbose=False)

    dataset = build(config["dataset"], ImageDataset)
    described = {**config["model"], "attention": config["attention"], "head": config["head"]}
    resumed = _resume_state(cfg.resume, described, dataset)
    # The run folder's name is no part of what a model is.
    kept = [text for text in overrides if not text.startswith("resume=")]
    metadata = make_metadata(dataset.spec, described, _placed(config["dataset"]), config, kept)
    model = ImageTransformer(dataset.spec, **described)
    module = ImageModule(model, instantiate(cfg.optimizer), instantiate(cfg.scheduler))
    data = ImageDataModule(dataset, cfg.batch_size, cfg.seed, cfg.eval_batch_size)

    trainer = _trainer(cfg, [Metadata(metadata, dataset), ExactSteps(cfg.seed), Interruptible()])
    _write_config(folder, config)
    trainer.loggers = build_loggers(config["logger"], folder, config, resumed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _say_what(cfg, dataset, parameters, folder, trainer)

    finished = False
    try:
        trainer.fit(module, datamodule=data, ckpt_path=cfg.resume, weights_only=True)
        finished = True
    finally:
        summary = _summary(trainer, folder, parameters, finished)
        _close(trainer.loggers, finished)
        if trainer.is_global_zero:
            write_atomic(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
            if not finished and (folder / "checkpoints/last.ckpt").exists():
                print(f"to continue: python train.py resume={_shown(folder)}", file=sys.stderr)
    if resumed and resumed["step"] == trainer.global_step:
        raise UserError(
            f"the run in {folder} has come to its end already ({_limits(cfg)}); raise the limit to "
            "train it further, for example trainer.max_epochs=40."
        )
    _say_result(summary, folder)
    return summary


def _placed(dataset: Mapping[str, Any]) -> dict[str, Any]:
    """The data set's options, with folders that do not depend on the working directory."""
    folders = {key: dataset[key] for key in ("root", "cache") if dataset.get(key) is not None}
    return {**dataset, **{key: str(Path(f).expanduser().absolute()) for key, f in folders.items()}}


def _resume_state(
    resume: str | None, model: Mapping[str, Any], dataset: ImageDataset
) -> dict[str, Any] | None:
    if resume is None:
        return None
    state = read_resume_state(resume)
    metadata = state.pop("metadata")
    if metadata["spec"] != dataset.spec.to_dict():
        raise UserError(
            f"{resume} was trained on images of {metadata['spec']}, but the data set has "
            f"{dataset.spec.to_dict()}; resume with the data set it was trained on."
        )
    before = metadata["model"]
    changed = [key for key in {**before, **model} if before.get(key) != model.get(key)]
    if changed:
        raise UserError(
            f"{resume} cannot be resumed with another model: {', '.join(changed)} differ; leave "
            "those options as they were, or start a new run."
        )
    return state


def _trainer(cfg: DictConfig, callbacks: list[Callback]) -> Trainer:
    options: dict[str, Any] = OmegaConf.to_container(cfg.trainer, resolve=True)  # type: ignore[assignment]
    # Always timed; Lightning's own timer, which max_time would add, could not stand beside this.
    callbacks.append(Timer(_duration(options.pop("max_time", None)), verbose=False))
    callbacks.extend(
        instantiate(node) for node in cfg.callbacks.values() if node and node.get("_target_")
    )
    progress = sys.stderr.isatty()
    if progress:
        callbacks.append(RichProgressBar())
    if options.get("limit_val_batches") == 0:
        callbacks = [c for c in callbacks if not (isinstance(c, ModelCheckpoint) and c.monitor)]
    trainer: Trainer = instantiate(
        options,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=progress,
        plugins=[AtomicCheckpoints()],
    )
    return trainer


def _duration(text: str | None) -> timedelta | None:
    """The time that "days:hours:minutes:seconds" stands for."""
    if text is None:
        return None
    parts = str(text).split(":")
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        raise UserError(
            f"trainer.max_time={text} must be days:hours:minutes:seconds, such as 00:00:30:00."
        )
    days, hours, minutes, seconds = map(int, parts)
    duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if not duration:
        raise UserError(f"trainer.max_time={text} leaves no time to train; give at least a second.")
    return duration


@rank_zero_only
def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    write_atomic(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(config))))


def _summary(trainer: Trainer, folder: Path, parameters: int, finished: bool) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "state": "finished" if finished else "interrupted",
        "best_bits_per_dim": None,
        "best_checkpoint": None,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "seconds": 0.0,
        "images_per_second": None,
        "parameters": parameters,
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
def _close(loggers: list[Logger], finished: bool) -> None:
    close_loggers(loggers, finished)


@rank_zero_only
def _say_what(
    cfg: DictConfig, dataset: ImageDataset, parameters: int, folder: Path, trainer: Trainer
) -> None:
    spec = dataset.spec
    attention = str(cfg.attention.get("_target_")).rpartition(".")[2]
    print(
        f"{dataset.name}: {spec.height}x{spec.width}x{spec.channels}, {spec.levels} levels; "
        f"{attention}, {cfg.model.n_layers} layers x {cfg.model.d_model}, "
        f"{parameters / 1e6:.2f} M parameters; {trainer.accelerator.__class__.__name__}"
    )
    print(f"run folder: {_shown(folder)}", flush=True)


@rank_zero_only
def _say_result(summary: Mapping[str, Any], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    best = summary["best_bits_per_dim"]
    rows = {
        "best validation": "none" if best is None else f"{best:.4f} bits/dim",
        "best checkpoint": summary["best_checkpoint"] or "none",
        "steps": f"{summary['steps']:,} in {summary['epochs']} epochs",
        "time": format_seconds(summary["seconds"]),
        "parameters": f"{summary['parameters']:,}",
        "run folder": _shown(folder),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    run = _shown(folder)
    if not (folder / "checkpoints").is_dir():
        return
    print(
        "next:\n"
        f"  python sample.py ckpt={run} n=64\n"
        f"  python sample.py ckpt={run} task=complete\n"
        f"  python -m imagegen.evaluate ckpt={run} split=test"
    )


def _limits(cfg: DictConfig) -> str:
    names = ("max_epochs", "max_steps", "max_time")
    return ", ".join(
        f"trainer.{name}={cfg.trainer[name]}"
        for name in names
        if cfg.trainer.get(name) not in (None, -1)
    )


def _shown(folder: Path) -> str:
    """The folder as a user can type it behind `ckpt=`, relative where that is shorter."""
    path = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    plain = str(path)
    if all(char.isalnum() or char in "/._-+:" for char in plain):
        return plain
    return shlex.quote(quote(plain))
