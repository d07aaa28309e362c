"""The Trainer of a run with its callbacks, refused where they could not do what they say."""

from __future__ import annotations

import glob
import math
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, Timer

from imagegen.core.build import build_section, check_section
from imagegen.core.durations import parse_duration
from imagegen.core.errors import UserError
from imagegen.core.installation import typed
from imagegen.training.callbacks import METRICS
from imagegen.training.checkpoint_callbacks import AtomicCheckpoints, KeepUnvalidated


def build_trainer(
    cfg: DictConfig, trainer_options: Mapping[str, Any], folder: Path, callbacks: list[Callback]
) -> Trainer:
    """Lightning's Trainer, with the callbacks of the configuration behind these.

    Raises:
        UserError: for options and callbacks that it cannot do as they seem to say.
    """
    options = dict(trainer_options)
    plugins = options.pop("plugins", [])
    check_section("trainer", options)
    clip = options.get("gradient_clip_val")
    if clip is not None and not 0 <= clip < math.inf:
        raise UserError(
            f"trainer.gradient_clip_val={clip} must be a number of at least 0; null does not clip."
        )
    # Always timed; Lightning's own timer, which max_time would add, would conflict with this.
    callbacks.append(Timer(_duration(options.pop("max_time", None)), verbose=False))
    named = {
        f"callbacks.{name}": build_section(node, f"callbacks.{name}", Callback)
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
    _check_saving(named, cfg.callbacks, new=cfg.resume is None)
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


def _check_saving(named: Mapping[str, Callback], options: Mapping[str, Any], new: bool) -> None:
    """Refuse checkpoints that would not be what they seem, or replace those of another run."""
    for name, callback in named.items():
        if not isinstance(callback, ModelCheckpoint):
            continue
        if callback.save_weights_only:
            raise UserError(
                f"{name}.save_weights_only=true leaves out what drawing and resuming need; leave "
                f"it out, and write the weights alone with {typed('export')}."
            )
        given = options[name.partition(".")[2]]
        between = given.get("every_n_train_steps") or given.get("train_time_interval")
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
