"""A training run: everything between a composed configuration and the run folder's summary."""

from __future__ import annotations

import io
import json
import logging
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint, RichProgressBar, Timer
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from imagegen.bad_numbers import BadNumbers
from imagegen.build import check_section
from imagegen.callbacks import ExactSteps, Interruptible
from imagegen.checkpoint import KEY, make_metadata, read_resume_state
from imagegen.cli import is_first_process
from imagegen.data.base import ImageDataset
from imagegen.data.datamodule import ImageDataModule
from imagegen.data.identity import build_dataset, remember
from imagegen.errors import UserError
from imagegen.installation import typed
from imagegen.launcher import further_processes
from imagegen.loggers import build_loggers, close_loggers, logger_state
from imagegen.machine import AUTO as AUTO_PRECISION
from imagegen.machine import TF32, Choice, describe, prepare, training_precision
from imagegen.model import ImageTransformer, default_options
from imagegen.model_options import model_options
from imagegen.optimizers import OptimizerFactory, build_optimizer
from imagegen.output import write_atomic
from imagegen.processes import check_sharding
from imagegen.resume import AUTO, LAST, claim_run_folder
from imagegen.summary import argument, limits, say_result, say_what, summarize
from imagegen.survival import FirstCheckpoint, KeepUnvalidated, WholeSteps, requeue_job
from imagegen.sweeps import sweep_group
from imagegen.training import ImageModule, Schedule

MAX_SEED = 2**32 - 1


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
        if cfg.resume == AUTO:
            cfg.resume = str(folder / LAST) if (folder / LAST).is_file() else None
        try:
            multirun = hydra.mode == RunMode.MULTIRUN
            return _train(cfg, folder, list(hydra.overrides.task), multirun)
        except Exception:
            _remove_if_unused(folder)
            raise


def _train(cfg: DictConfig, folder: Path, overrides: list[str], multirun: bool) -> dict[str, Any]:
    quiet_lightning()
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    if not isinstance(cfg.seed, int) or not 0 <= cfg.seed <= MAX_SEED:
        raise UserError(f"seed={cfg.seed} must be a whole number from 0 to {MAX_SEED}.")
    seed_everything(cfg.seed, workers=True, verbose=False)

    if config["logger"].get("group", "") is None:
        config["logger"]["group"] = sweep_group()
    check_sharding(config["trainer"], config["callbacks"])
    dataset = build_dataset(config["dataset"], cfg.resume, overrides)
    described = model_options(config, dataset)
    resumed = _resume_state(cfg.resume, described, dataset)
    trainer_options, precision = _precision(config["trainer"], resumed)
    config["trainer"]["precision"] = precision.value
    # Whoever resumes this run says so anew.
    kept = [text for text in overrides if not text.startswith("resume=")]
    model = ImageTransformer(dataset.spec, **described)
    schedule: Schedule = made(cfg.scheduler, "scheduler", Schedule)
    module = ImageModule(model, optimizer_factory(cfg, model), schedule)
    data = ImageDataModule(dataset, cfg.batch_size, cfg.seed, cfg.eval_batch_size)
    interruptible = Interruptible()
    # What stops a run between two steps comes after what knows that it is between two.
    bad_numbers = BadNumbers(cfg.on_nan, folder)
    own: list[Callback] = [ExactSteps(cfg.seed), bad_numbers, WholeSteps(), interruptible]
    if cfg.callbacks.get("last"):
        own.append(FirstCheckpoint(folder / LAST))
    trainer = _trainer(cfg, trainer_options, folder, own)
    threads = prepare(
        trainer.num_devices if trainer.world_size > 1 else 1, tf32=precision.value == TF32
    )
    machine = {**describe(trainer.strategy.root_device), "precision": precision.value}
    metadata = make_metadata(
        dataset.spec, described, _placed(config["dataset"]), config, kept, machine
    )
    trainer.callbacks.insert(0, Metadata(metadata, dataset))  # type: ignore[attr-defined]
    # Before anything is written, so that data that cannot be had leave no run behind.
    data.prepare_data()
    data.split("train")
    metadata["data"] = remember(dataset, cfg.resume)

    _write_config(folder, config)
    trainer.loggers = build_loggers(config["logger"], folder, config, resumed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say_what(cfg, dataset, parameters, folder, trainer, precision, threads)

    # A run that is killed leaves this behind; see `imagegen.runs`.
    _write_summary(folder, summarize(trainer, folder, parameters, "running", machine))
    state = "failed"
    try:
        with further_processes(trainer, overrides, folder, multirun):
            trainer.fit(module, datamodule=data, ckpt_path=cfg.resume, weights_only=True)
        state = "finished"
    except (KeyboardInterrupt, SystemExit):
        state = "interrupted"
        raise
    finally:
        summary = summarize(trainer, folder, parameters, state, machine)
        _close(trainer.loggers, state == "finished", trainer.global_step)
        _write_summary(folder, summary)
        if trainer.is_global_zero:
            if state != "finished" and (folder / "checkpoints/last.ckpt").exists():
                again = f"{typed('train')} {argument('resume', folder)}"
                print(f"to continue: {again}", file=sys.stderr)
            if interruptible.preempted:
                requeue_job()
    if trainer.is_global_zero and resumed and resumed["step"] == trainer.global_step:
        raise UserError(
            f"the run in {folder} has come to its end already ({limits(cfg)}); raise the limit to "
            "train it further, for example trainer.max_epochs=40."
        )
    say_result(summary, folder)
    return summary


def quiet_lightning() -> None:
    """Silence what Lightning says of things that are as they should be."""
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    # The folder of a run that goes on holds its checkpoints.
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    # Lightning 2.6 asks torch's pytree in the old way; nothing that a user could mend.
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\).*")
    # Small data sets make short epochs; rows of the log then stand further apart than epochs.
    warnings.filterwarnings("ignore", "The number of training batches .* is smaller")
    # A gradient scaler leaves out the first steps while its scale is too large; the schedule counts
    # them nevertheless, as the limits of a run do.
    warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before")


def _remove_if_unused(folder: Path) -> None:
    """Remove a run folder that holds only what Hydra has put there: no run has begun in it."""
    if is_first_process() and {path.name for path in folder.iterdir()} <= {".hydra", "train.log"}:
        shutil.rmtree(folder, ignore_errors=True)


def optimizer_factory(cfg: DictConfig, model: ImageTransformer) -> OptimizerFactory:
    """The optimizer's factory, tried once, so that bad settings are refused before a run begins."""
    factory: OptimizerFactory = made(cfg.optimizer, "optimizer", Callable)
    try:
        optimizer = build_optimizer(factory, model)
    # Settings of all kinds meet foreign code here.
    except Exception as error:
        raise UserError(f"the optimizer refuses its settings: {error}.") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer._target_={cfg.optimizer.get('_target_')} is no optimizer of PyTorch; "
            "choose one, such as torch.optim.AdamW."
        )
    return factory


def made(node: Any, section: str, kind: Any) -> Any:
    """What a section of the configuration describes by its `_target_`.

    Raises:
        UserError: where that is something else than a `kind`, or an option is of another kind than
            what it describes takes.
    """
    if isinstance(node, Mapping):
        check_section(section, node)
    found = instantiate(node)
    if not isinstance(found, kind):
        target = node.get("_target_") if isinstance(node, Mapping) else node
        raise UserError(
            f"{section}._target_={target} gives a {type(found).__name__}, but {section} must be a "
            f"{kind.__name__}."
        )
    return found


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
    # A checkpoint of before lacks the options that have come since, which do nothing by default.
    before, now = ({**default_options(), **options} for options in (metadata["model"], model))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        raise UserError(
            f"{resume} cannot be resumed with another model: {', '.join(changed)} differ; leave "
            "those options as they were, or start a new run."
        )
    return state


def _precision(
    trainer: Mapping[str, Any], resumed: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Choice]:
    """`training_precision`, with what a resumed run had until now in its reason."""
    before = None if resumed is None else resumed["precision"]
    options, choice = training_precision(trainer, before)
    if resumed is not None and before is None and trainer.get("precision") == AUTO_PRECISION:
        choice = replace(choice, reason=f"{choice.reason}; the checkpoint does not name its own")
    elif before not in (None, choice.value):
        choice = replace(choice, reason=f"{choice.reason}; the run had {before} until now")
    return options, choice


def _trainer(
    cfg: DictConfig, trainer_options: Mapping[str, Any], folder: Path, callbacks: list[Callback]
) -> Trainer:
    options = dict(trainer_options)
    plugins = options.pop("plugins", [])
    check_section("trainer", options)
    clip = options.get("gradient_clip_val")
    if clip is not None and not 0 <= clip < math.inf:
        raise UserError(
            f"trainer.gradient_clip_val={clip} must be a number of at least 0; null does not clip."
        )
    # Always timed; Lightning's own timer, which max_time would add, could not stand beside this.
    callbacks.append(Timer(_duration(options.pop("max_time", None)), verbose=False))
    callbacks.extend(
        made(node, f"callbacks.{name}", Callback)
        for name, node in cfg.callbacks.items()
        if node and node.get("_target_")
    )
    progress = sys.stderr.isatty()
    if progress:
        callbacks.append(RichProgressBar())
    if options.get("limit_val_batches") == 0:
        callbacks = [c for c in callbacks if not (isinstance(c, ModelCheckpoint) and c.monitor)]
        callbacks.append(KeepUnvalidated())
    trainer: Trainer = instantiate(
        options,
        callbacks=callbacks,
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=progress,
        plugins=[AtomicCheckpoints(), *plugins],
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


@rank_zero_only
def _write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    write_atomic(folder / "summary.json", json.dumps(dict(summary), indent=2) + "\n")


@rank_zero_only
def _close(loggers: list[Logger], finished: bool, steps: int) -> None:
    close_loggers(loggers, finished, steps)
