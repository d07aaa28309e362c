"""A training run: everything between a composed configuration and the run folder's summary."""

from __future__ import annotations

import glob
import json
import logging
import math
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import Callback, Trainer, seed_everything
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, Timer
from pytorch_lightning.loggers import Logger
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from imagegen.checkpoint.reading import make_metadata, read_resume_state
from imagegen.checkpoint.training_data import build_dataset, remember
from imagegen.core.build import check_section, times_in
from imagegen.core.durations import parse_duration
from imagegen.core.errors import UserError
from imagegen.core.files import remove_leftovers, write_atomic
from imagegen.core.installation import typed
from imagegen.core.machine import AUTO as AUTO_PRECISION
from imagegen.core.machine import TF32, Choice, describe, prepare, training_precision
from imagegen.core.moved import current_name
from imagegen.core.processes import is_first_process
from imagegen.data.base import ImageDataset
from imagegen.data.datamodule import ImageDataModule
from imagegen.model.transformer import ImageTransformer, default_options
from imagegen.tracking.loggers import build_loggers, check_logger, close_loggers
from imagegen.tracking.metrics_file import MetricsFile
from imagegen.tracking.sweeps import sweep_group
from imagegen.training.callbacks import METRICS, ExactSteps
from imagegen.training.checkpoint_callbacks import (
    AtomicCheckpoints,
    FirstCheckpoint,
    KeepUnvalidated,
    Metadata,
)
from imagegen.training.continuation import Beginning, recall, say_changes
from imagegen.training.launcher import further_processes
from imagegen.training.model_options import model_options
from imagegen.training.module import ImageModule, Schedule
from imagegen.training.optimizers import OptimizerFactory, build_optimizer
from imagegen.training.processes import check_sharding
from imagegen.training.profile import ProfileReport
from imagegen.training.run_folder import AUTO, LAST, claim_run_folder
from imagegen.training.stopping import (
    BadNumbers,
    Diverged,
    Interruptible,
    WholeSteps,
    heed_interrupts,
    requeue_job,
)
from imagegen.training.summary import (
    argument,
    limits,
    say_result,
    say_tried,
    say_what,
    summarize,
    why_stopped,
)

MAX_SEED = 2**32 - 1


def train(cfg: DictConfig) -> dict[str, Any]:
    """Train as configured; leaves checkpoints, pictures, metrics and a summary in the run folder.

    Returns:
        The summary, as written to `summary.json`.

    Raises:
        UserError: for a configuration that cannot be trained.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir).absolute()
    # hydra.job.chdir=true enters the run folder, but paths were typed where the command was.
    os.chdir(hydra.runtime.cwd)
    with claim_run_folder(folder, resuming=cfg.resume is not None):
        if cfg.resume == AUTO:
            cfg.resume = str(folder / LAST) if (folder / LAST).is_file() else None
        try:
            multirun = hydra.mode == RunMode.MULTIRUN
            return _train(cfg, folder, list(hydra.overrides.task), multirun)
        finally:
            _remove_if_unused(folder)


def _train(cfg: DictConfig, folder: Path, overrides: list[str], multirun: bool) -> dict[str, Any]:
    quiet_lightning()
    changes = {} if cfg.resume is None else recall(cfg, folder, overrides)
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    if not isinstance(cfg.seed, int) or not 0 <= cfg.seed <= MAX_SEED:
        raise UserError(f"seed={cfg.seed} must be a whole number from 0 to {MAX_SEED}.")
    seed_everything(cfg.seed, workers=True, verbose=False)

    if config["logger"].get("group", "") is None:
        config["logger"]["group"] = sweep_group()
    check_logger(config["logger"])
    check_sharding(config["trainer"], config["callbacks"])
    dataset = build_dataset(config["dataset"], cfg.resume, overrides)
    described = model_options(config, dataset)
    resumed = _resume_state(cfg.resume, described, dataset)
    trainer_options, precision = _precision(config["trainer"], resumed)
    config["trainer"]["precision"] = precision.value
    # Whoever resumes this run says so anew.
    kept = [text for text in overrides if not text.startswith("resume=")]
    model = ImageTransformer.from_options(dataset.spec, **described)
    schedule: Schedule = made(cfg.scheduler, "scheduler", Schedule)
    module = ImageModule(model, optimizer_factory(cfg, model), schedule)
    data = ImageDataModule(dataset, cfg.batch_size, cfg.seed, cfg.eval_batch_size)
    interruptible = Interruptible()
    trying = int(cfg.trainer.get("fast_dev_run") or 0)
    if trying and cfg.resume is not None:
        raise UserError("trainer.fast_dev_run only tries a new run; leave it out to resume one.")

    def begin() -> None:
        if trying:
            return
        if is_first_process():
            remove_leftovers(folder, folder / LAST.parent, folder / "samples")
        _write_config(folder, cfg, config)
        trainer.loggers = build_loggers(config["logger"], folder, config, resumed)
        # A run that is killed leaves this behind; see `imagegen.tracking.runs`.
        _write_summary(folder, summarize(trainer, folder, parameters, "running", machine))
        if resumed is not None:
            say_changes(resumed["step"], changes)

    beginning = Beginning(begin, changes)
    # What stops a run between two steps comes after what knows that it is between two, and what is
    # written before the first step after what lets the run begin.
    own: list[Callback] = [ExactSteps(cfg.seed), beginning, BadNumbers(cfg.on_nan, folder)]
    own += [WholeSteps(), interruptible]
    if cfg.callbacks.get("last") and not trying:
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

    profile = ProfileReport(trainer.profiler)  # type: ignore[attr-defined]
    # Until the run begins. What logs nothing writes nothing.
    trainer.loggers = [DummyLogger() if trying else MetricsFile(folder)]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say_what(cfg, dataset, parameters, folder, trainer, precision, threads)
    state, lower = "failed", ""
    try:
        with further_processes(trainer, overrides, folder, multirun):
            trainer.fit(module, datamodule=data, ckpt_path=cfg.resume, weights_only=True)
        if not beginning.begun and trainer.is_global_zero:
            _refuse_to_begin(trainer, cfg, folder)
            # The run was killed after its last step.
            begin()
            beginning.begun = True
        state = "finished"
    except (KeyboardInterrupt, SystemExit):
        state = "interrupted"
        raise
    except ValueError as error:
        if beginning.begun or "val_check_interval" not in str(error):
            raise
        raise UserError(
            f"trainer.val_check_interval={cfg.trainer.val_check_interval} batches are more than "
            f"the {trainer.num_training_batches} of an epoch; give fewer, or add "
            "trainer.check_val_every_n_epoch=null to count through all epochs."
        ) from error
    except Diverged:
        if cfg.optimizer.get("lr"):
            lower = f" optimizer.lr={cfg.optimizer.lr / 10:g}"
        raise
    finally:
        summary = summarize(trainer, folder, parameters, state, machine)
        heed_interrupts()
        if beginning.begun and not trying:
            # First, for loggers may wait for a server, and be interrupted.
            _write_summary(folder, summary)
            _close(trainer.loggers, state == "finished", trainer.global_step)
            profile.write(folder)
            if trainer.is_global_zero and state != "finished" and (folder / LAST).exists():
                again = f"{typed('train')} {argument('resume', folder)}{lower}"
                print(f"to continue: {again}", file=sys.stderr)
        if interruptible.preempted and trainer.is_global_zero:
            requeue_job()
    if trying:
        profile.say()
        say_tried(trying)
    else:
        say_result(summary, folder)
    return summary


def _refuse_to_begin(trainer: Trainer, cfg: DictConfig, folder: Path) -> None:
    """Refuse a run that has no step left to take, unless it never came to say so."""
    if cfg.resume is None:
        batches = f"trainer.limit_train_batches={cfg.trainer.get('limit_train_batches')}"
        raise UserError(f"there is nothing to train with {limits(cfg)}, {batches}.")
    summary = folder / "summary.json"
    if summary.exists() and json.loads(summary.read_text())["state"] != "finished":
        return
    stopped = why_stopped(trainer)
    if stopped:
        raise UserError(
            f"the run in {folder} was ended by early stopping ({stopped}); to train it further, "
            "raise its patience, for example callbacks.early_stopping.patience=20."
        )
    example = "trainer.max_epochs=40"
    if 0 < trainer.max_steps <= trainer.global_step:
        example = f"trainer.max_steps={2 * trainer.max_steps}"
    elif trainer.max_epochs in (None, -1) or trainer.current_epoch < trainer.max_epochs:
        example = "trainer.max_time=00:08:00:00"
    raise UserError(
        f"the run in {folder} has come to its end already ({limits(cfg)}); raise the limit to "
        f"train it further, for example {example}."
    )


def quiet_lightning() -> None:
    """Silence what Lightning says of things that are as they should be."""
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    # The folder of a run that goes on holds its checkpoints.
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    # Lightning 2.6 asks torch's pytree in the old way; nothing that a user could mend.
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\).*")
    # What differs from the run until now has been said, or begins afresh.
    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks used to")
    warnings.filterwarnings("ignore", "The checkpoint was not created with WeightAveraging")
    # Small data sets make short epochs; rows of the log then stand further apart than epochs.
    warnings.filterwarnings("ignore", "The number of training batches .* is smaller")
    # A gradient scaler leaves out the first steps while its scale is too large; the schedule counts
    # them nevertheless, as the limits of a run do.
    warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before")


def _remove_if_unused(folder: Path) -> None:
    """Remove a run folder that holds a log at most: no run has begun in it."""
    if is_first_process() and {path.name for path in folder.iterdir()} <= {"train.log"}:
        # Its log is opened by the first line, which may still come.
        for handler in list(logging.root.handlers):
            if isinstance(handler, logging.FileHandler):
                if Path(handler.baseFilename).parent == folder:
                    logging.root.removeHandler(handler)
                    handler.close()
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
        node = {**node, "_target_": current_name(node.get("_target_"))}
        check_section(section, node)
    times = times_in(section, node) if isinstance(node, Mapping) else {}
    # Plain lists: a checkpoint keeps them, and is read without any other class.
    found = instantiate(node, _convert_="all", **times)
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
    named = {
        f"callbacks.{name}": made(node, f"callbacks.{name}", Callback)
        for name, node in cfg.callbacks.items()
        if node and node.get("_target_")
    }
    callbacks.extend(named.values())
    progress = sys.stderr.isatty()
    if progress:
        callbacks.append(RichProgressBar())
    if options.get("limit_val_batches") == 0:
        callbacks = [c for c in callbacks if not _waits_for_validation(c)]
        callbacks.append(KeepUnvalidated())
    _check_monitors(named, callbacks, validates=options.get("limit_val_batches") != 0)
    _check_saving(named, new=cfg.resume is None)
    trainer: Trainer = instantiate(
        options,
        callbacks=callbacks,
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=progress,
        plugins=[AtomicCheckpoints(), *plugins],
    )
    return trainer


def _waits_for_validation(callback: Callback) -> bool:
    monitor = callback.monitor if isinstance(callback, ModelCheckpoint) else None
    return monitor is not None and monitor.startswith("val/")


def _check_monitors(
    named: Mapping[str, Callback], callbacks: Sequence[Callback], validates: bool
) -> None:
    """Refuse a callback that waits for a metric which nothing logs.

    Not where a callback from elsewhere takes part, which may log anything.
    """
    logged = ["train/bits_per_dim", "val/bits_per_dim"][: 2 if validates else 1]
    for callback in callbacks:
        if not type(callback).__module__.startswith(("imagegen.", "pytorch_lightning.")):
            return
        logged += METRICS.get(type(callback), ())
    for name, callback in named.items():
        if not isinstance(callback, EarlyStopping | ModelCheckpoint) or callback not in callbacks:
            continue
        known = callback.monitor in (None, *logged) or str(callback.monitor).startswith("lr-")
        if isinstance(callback, ModelCheckpoint):
            known |= callback.monitor in ("step", "epoch")
        if not known:
            raise UserError(
                f"{name}.monitor={callback.monitor} is not logged by this run; it logs "
                f"{', '.join(logged)}."
            )


def _check_saving(named: Mapping[str, Callback], new: bool) -> None:
    """Refuse checkpoints that would not be what they seem, or replace those of another run."""
    for name, callback in named.items():
        if not isinstance(callback, ModelCheckpoint):
            continue
        if callback.save_weights_only:
            raise UserError(
                f"{name}.save_weights_only=true leaves out what drawing and resuming need; leave "
                f"it out, and write the weights alone with {typed('export')}."
            )
        between = callback._every_n_train_steps > 0 or callback._train_time_interval is not None
        if between and str(callback.monitor).startswith("val/"):
            raise UserError(
                f"{name} would save between validations with {callback.monitor} of earlier "
                "weights; leave out every_n_train_steps and train_time_interval, and validate more "
                "often with trainer.val_check_interval."
            )
        if callback.save_last and "callbacks.last" in named:
            raise UserError(
                f"{name}.save_last={callback.save_last}, but callbacks.last writes last.ckpt; "
                "leave one of them out."
            )
        pattern = re.sub(r"\{[^}]*\}", "*", glob.escape(f"{callback.filename}.ckpt"))
        found = sorted(Path(str(callback.dirpath)).glob(pattern)) if new else []
        if found:
            raise UserError(
                f"{name} would replace {found[0]} of an earlier run; give another {name}.dirpath, "
                "or resume that run."
            )


def _duration(text: str | None) -> timedelta | None:
    return None if text is None else parse_duration("trainer.max_time", text)


@rank_zero_only
def _write_config(folder: Path, cfg: DictConfig, config: Mapping[str, Any]) -> None:
    """Write what Hydra would have written before the run could be refused, and the resolved one."""
    hydra = HydraConfig.get()
    for name, content in (
        (".hydra/config.yaml", cfg),
        (".hydra/hydra.yaml", OmegaConf.create({"hydra": hydra})),
        (".hydra/overrides.yaml", hydra.overrides.task),
        ("config.yaml", OmegaConf.create(dict(config))),
    ):
        write_atomic(folder / name, OmegaConf.to_yaml(content))


@rank_zero_only
def _write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    write_atomic(folder / "summary.json", json.dumps(dict(summary), indent=2) + "\n")


@rank_zero_only
def _close(loggers: list[Logger], finished: bool, steps: int) -> None:
    close_loggers(loggers, finished, steps)
