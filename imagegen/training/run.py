"""A training run: everything between a composed configuration and the run folder's summary."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import Callback, Trainer, seed_everything
from pytorch_lightning.loggers import Logger
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from imagegen.attention.linear import LinearAttention
from imagegen.checkpoint.reading import make_metadata, read_resume_state
from imagegen.checkpoint.training_data import build_dataset, remember
from imagegen.core.build import build_section
from imagegen.core.durations import duration_text, parse_duration
from imagegen.core.errors import UserError
from imagegen.core.files import remove_leftovers, write_atomic
from imagegen.core.installation import typed
from imagegen.core.machine import AUTO as AUTO_PRECISION
from imagegen.core.machine import (
    TF32,
    Choice,
    describe,
    prepare,
    stored_dtype,
    training_precision,
)
from imagegen.core.moved import with_current_names
from imagegen.core.override_syntax import argument
from imagegen.core.processes import is_first_process
from imagegen.core.values import plain
from imagegen.data.base import ImageDataset
from imagegen.data.datamodule import ImageDataModule
from imagegen.model.transformer import ImageTransformer, default_options
from imagegen.tracking.loggers import build_loggers, check_logger, close_loggers
from imagegen.tracking.metrics_file import MetricsFile
from imagegen.tracking.sweeps import sweep_group
from imagegen.training.checkpoint_callbacks import FirstCheckpoint, Metadata
from imagegen.training.continuation import Beginning, recall, say_changes
from imagegen.training.exact_steps import ExactSteps
from imagegen.training.launcher import further_processes
from imagegen.training.lightning_fixes import quiet_lightning
from imagegen.training.model_options import model_options
from imagegen.training.module import ImageModule, Schedule
from imagegen.training.optimizers import optimizer_factory
from imagegen.training.processes import check_sharding
from imagegen.training.profile import ProfileReport
from imagegen.training.run_folder import (
    AUTO,
    LAST,
    claim_run_folder,
    has_finished,
    remove_if_unused,
)
from imagegen.training.stopping import (
    BadNumbers,
    Diverged,
    Interruptible,
    WholeSteps,
    heed_interrupts,
    requeue_job,
)
from imagegen.training.summary import (
    limits,
    say_result,
    say_tried,
    say_what,
    summarize,
    why_stopped,
)
from imagegen.training.trainer import build_trainer

LAST_SEED = 2**32 - 1  # that NumPy's generators take


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
            quiet_lightning()
            overrides = list(hydra.overrides.task)
            run = TrainingRun(cfg, folder, overrides)
            summary = run.fit(overrides, multirun)
            run.report(summary)
            return summary
        finally:
            remove_if_unused(folder)


class TrainingRun:
    """A run that is prepared, all its options checked: nothing of it is written before it begins.

    Args:
        cfg: the configuration; a resumed run's is completed from its checkpoint.
        folder: the run folder.
        overrides: what was typed, and what the checkpoint recalls of that.

    Raises:
        UserError: for a configuration that cannot be trained.
    """

    def __init__(self, cfg: DictConfig, folder: Path, overrides: list[str]) -> None:
        self.cfg, self.folder = cfg, folder
        self.changes = {} if cfg.resume is None else recall(cfg, folder, overrides)
        self.config = config = _checked(cfg)
        self.tries = int(cfg.trainer.get("fast_dev_run") or 0)
        dataset = build_dataset(config["dataset"], cfg.resume, overrides)
        described = model_options(config, dataset)
        self.resumed = _resume_state(cfg.resume, described, dataset)
        options, precision = _precision(config["trainer"], self.resumed)
        config["trainer"]["precision"] = precision.value
        model = ImageTransformer.from_options(dataset.spec, **described)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        schedule: Schedule = build_section(cfg.scheduler, "scheduler", Schedule)
        self.module = ImageModule(model, optimizer_factory(cfg, model), schedule)
        self.data = ImageDataModule(dataset, cfg.batch_size, cfg.seed, cfg.eval_batch_size)
        if self.tries and cfg.resume is not None:
            raise UserError(
                "trainer.fast_dev_run only tries a new run; leave it out to resume one."
            )
        self.interruptible = Interruptible()
        self.beginning = Beginning(self._begin, self.changes)
        self.trainer = build_trainer(cfg, options, folder, self._own_callbacks())
        threads = prepare(
            self.trainer.num_devices if self.trainer.world_size > 1 else 1,
            tf32=precision.value == TF32,
        )
        device = self.trainer.strategy.root_device
        self.machine = {
            **describe(device),
            "precision": precision.value,
            "precision_reason": precision.reason,
            "threads_reason": threads.reason,
            **_linear_attention(model, device, precision.value),
        }
        # Whoever resumes this run says so anew.
        kept = [text for text in overrides if not text.startswith("resume=")]
        placed = _placed(config["dataset"])
        metadata = make_metadata(dataset.spec, described, placed, config, kept, self.machine)
        self.trainer.callbacks.insert(0, Metadata(metadata, dataset))  # type: ignore[attr-defined]
        # Before anything is written, so that data that cannot be had leave no run behind.
        self.data.prepare_data()
        self.data.split("train")
        metadata["data"] = self.beginning.data = remember(dataset, cfg.resume)
        self.profile = ProfileReport(self.trainer.profiler)  # type: ignore[attr-defined]
        # Until the run begins. What logs nothing writes nothing.
        self.trainer.loggers = [DummyLogger() if self.tries else MetricsFile(folder)]
        say_what(cfg, dataset, self.parameters, folder, self.trainer, precision, threads)

    def fit(self, overrides: list[str], multirun: bool) -> dict[str, Any]:
        """Train until the end, an interruption or an error, and write how it ended.

        Args:
            overrides: as for the run.
            multirun: whether it is one of a sweep.

        Returns:
            the summary.
        """
        cfg, trainer, state, lower = self.cfg, self.trainer, "failed", ""
        try:
            with further_processes(trainer, overrides, self.folder, multirun):
                trainer.fit(
                    self.module, datamodule=self.data, ckpt_path=cfg.resume, weights_only=True
                )
            if not self.beginning.begun and trainer.is_global_zero:
                _refuse_to_begin(trainer, cfg, self.folder, self.changes)
                # The run was killed after its last step.
                self._begin()
                self.beginning.begun = True
            state = "finished"
        except (KeyboardInterrupt, SystemExit):
            state = "interrupted"
            raise
        except ValueError as error:
            if self.beginning.begun or "val_check_interval" not in str(error):
                raise
            raise UserError(
                f"trainer.val_check_interval={cfg.trainer.val_check_interval} batches are more "
                f"than the {trainer.num_training_batches} of an epoch; give fewer, or add "
                "trainer.check_val_every_n_epoch=null to count through all epochs."
            ) from error
        except Diverged:
            if cfg.optimizer.get("lr"):
                lower = f" optimizer.lr={cfg.optimizer.lr / 10:g}"
            raise
        finally:
            summary = self._summarize(state)
            heed_interrupts()
            self._end(summary, lower)
        return summary

    def report(self, summary: Mapping[str, Any]) -> None:
        """Print what came of it."""
        if self.tries:
            self.profile.say()
            say_tried(self.tries)
        else:
            say_result(summary, self.folder)

    def _own_callbacks(self) -> list[Callback]:
        # What stops a run between two steps comes after what knows that it is between two, and what
        # is written before the first step after what lets the run begin.
        own: list[Callback] = [ExactSteps(self.cfg.seed), self.beginning]
        own += [BadNumbers(self.cfg.on_nan, self.folder), WholeSteps(), self.interruptible]
        if self.cfg.callbacks.get("last") and not self.tries:
            own.append(FirstCheckpoint(self.folder / LAST))
        return own

    def _summarize(self, state: str) -> dict[str, Any]:
        return summarize(self.trainer, self.folder, self.parameters, state, self.machine)

    def _begin(self) -> None:
        if self.tries:
            return
        folder, config = self.folder, self.config
        if is_first_process():
            remove_leftovers(folder, folder / LAST.parent, folder / "samples")
        _write_config(folder, self.cfg, config)
        self.trainer.loggers = build_loggers(config["logger"], folder, config, self.resumed)
        # A run that is killed leaves this behind; see `imagegen.tracking.runs_table`.
        _write_summary(folder, self._summarize("running"))
        if self.resumed is not None:
            say_changes(self.resumed["step"], self.changes)

    def _end(self, summary: Mapping[str, Any], lower: str) -> None:
        trainer, folder, finished = self.trainer, self.folder, summary["state"] == "finished"
        if self.beginning.begun and not self.tries:
            # First, for loggers may wait for a server, and be interrupted.
            _write_summary(folder, summary)
            _close(trainer.loggers, finished, trainer.global_step)
            self.profile.write(folder)
            if trainer.is_global_zero and not finished and (folder / LAST).exists():
                again = f"{typed('train')} {argument('resume', folder)}{lower}"
                print(f"to continue: {again}", file=sys.stderr)
        if self.interruptible.preempted and trainer.is_global_zero:
            requeue_job()


def _checked(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain containers, with what can be said of it at once; seeds all."""
    config: dict[str, Any] = with_current_names(plain(cfg))
    if not isinstance(cfg.seed, int) or not 0 <= cfg.seed <= LAST_SEED:
        raise UserError(f"seed={cfg.seed} must be a whole number from 0 to {LAST_SEED}.")
    seed_everything(cfg.seed, workers=True, verbose=False)
    if config["logger"].get("group", "") is None:
        config["logger"]["group"] = sweep_group()
    check_logger(config["logger"])
    check_sharding(config["trainer"], config["callbacks"])
    return config


def _linear_attention(
    model: ImageTransformer, device: torch.device, precision: str
) -> dict[str, str]:
    """How linear attention is computed, where the model has some: all of its layers alike."""
    for layer in model.modules():
        if isinstance(layer, LinearAttention):
            how = layer.computed(model.raster.length, device, stored_dtype(precision))
            return {"linear_attention": how.value, "linear_attention_reason": how.reason}
    return {}


def _refuse_to_begin(
    trainer: Trainer, cfg: DictConfig, folder: Path, changes: Mapping[str, Any]
) -> None:
    """Refuse a run that has no step left to take, unless it was ended before it could say so."""
    if cfg.resume is None:
        batches = f"trainer.limit_train_batches={cfg.trainer.get('limit_train_batches')}"
        raise UserError(f"there is nothing to train with {limits(cfg)}, {batches}.")
    finished = has_finished(folder)
    lowered = any(key.startswith("trainer.max_") for key in changes)
    if (folder / "summary.json").exists() and not finished and not lowered:
        return
    stopped = why_stopped(trainer)
    if stopped:
        raise UserError(
            f"the run in {folder} was ended by early stopping ({stopped}); to train it further, "
            "raise its patience, for example callbacks.early_stopping.patience=20."
        )
    if 0 < trainer.max_steps <= trainer.global_step:
        example = f"trainer.max_steps={2 * trainer.global_step}"
    elif cfg.trainer.get("max_time") is None or trainer.current_epoch == trainer.max_epochs:
        example = f"trainer.max_epochs={2 * int(trainer.max_epochs or 1)}"
    else:
        spent = parse_duration("trainer.max_time", cfg.trainer.max_time)
        example = f"trainer.max_time={duration_text(2 * spent)}"
    taken = f"has already taken {trainer.global_step} steps"
    passed = "has already finished" if finished else taken
    raise UserError(
        f"the run in {folder} {passed} ({limits(cfg)}); raise the limit to train it further, for "
        f"example {example}."
    )


def _placed(dataset: Mapping[str, Any]) -> dict[str, Any]:
    """The data set's options, with folders that do not depend on the working directory."""
    folders = {key: dataset[key] for key in ("root", "cache") if dataset.get(key) is not None}
    # Through links, as the system reads "..".
    paths = {key: Path(folder).expanduser().absolute() for key, folder in folders.items()}
    return {
        **dataset,
        **{key: str(p.resolve() if ".." in p.parts else p) for key, p in paths.items()},
    }


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
