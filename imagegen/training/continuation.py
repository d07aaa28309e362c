"""What a resumed run takes from its checkpoint, what from the command line, and what it refuses.

An option typed at `resume=` takes effect from the next step on, or is refused before anything is
written. One that is not typed stays as the run began, even where this version has another default.
docs/resume.md lists every option.
"""

from __future__ import annotations

import copy
import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from imagegen.checkpoint.reading import KEY, read_metadata
from imagegen.core.errors import UserError
from imagegen.core.installation import typed
from imagegen.core.override_syntax import touched
from imagegen.core.values import plain
from imagegen.data.loading import TrainOrder
from imagegen.training.lightning_fixes import end_no_epoch_twice
from imagegen.training.module import ImageModule
from imagegen.training.optimizers import build_optimizer
from imagegen.training.run_folder import has_finished

Changes = dict[str, tuple[Any, Any]]
"""Options by name, with their values until now and from now on; `UNSET` where there was none."""

UNSET = "unset"

_MODEL = "the weights are those of the model that it began with"
_DATA = "it was trained on other images, or on images of the other splits"
REFUSED = {
    "model": _MODEL,
    "attention": _MODEL,
    "head": _MODEL,
    "optimizer._target_": "the optimizer's state is of the kind that it began with",
    "dataset": _DATA,
}
"""Options, and sections of them, that a run keeps; the most specific entry counts."""
_ALLOWED = ("dataset.root", "dataset.cache", "dataset.download")
_WHOLE_EPOCHS = ("trainer.accumulate_grad_batches", "trainer.limit_train_batches")
"""What may change between two epochs only; so may what `TrainOrder` depends on."""
_DECIDED_ELSEWHERE = ("resume", "trainer.precision")
_COUNT_OR_SHARE = tuple(
    f"trainer.{name}"
    for name in (
        "limit_train_batches",
        "limit_val_batches",
        "overfit_batches",
        "val_check_interval",
    )
)
"""Options of which Lightning takes 1 as one batch and 1.0 as all of them."""


def recall(cfg: DictConfig, folder: Path, overrides: Sequence[str]) -> Changes:
    """Give the options that are not typed now the values that the run has had until now.

    Values that could run other code, data sets (see `imagegen.data`) and the precision (see
    `imagegen.core.machine`) are left as they are.

    Args:
        cfg: the configuration, with `resume`; changed in place.
        folder: the run folder.
        overrides: those of this command, including the ones that the checkpoint has recalled.

    Returns:
        the options that are typed and differ.

    Raises:
        UserError: naming those of them that a run cannot change.
    """
    metadata = read_metadata(cfg.resume)
    saved = [str(text) for text in metadata["overrides"] or []]
    before, now = dict(_leaves(metadata["config"])), dict(_leaves(plain(cfg)))
    # Relative folders are kept as absolute ones too, which are typed for the user.
    for key in ("dataset.root", "dataset.cache"):
        placed = metadata["dataset"].get(key.partition(".")[2])
        if key in before and now.get(key) == placed:
            before[key] = placed
    differing = [
        key
        for key, value in now.items()
        if _differ(key, before.get(key, UNSET), value)
        and key not in _DECIDED_ELSEWHERE
        and not (isinstance(value, str) and Path(value).is_relative_to(folder))
    ]
    typed = [text for text in overrides if text not in saved]
    unchanged = now
    if typed and differing:
        # What this version makes of what was typed before; its defaults may have changed.
        name = HydraConfig.get().job.config_name
        unchanged = dict(_leaves(plain(hydra.compose(name, overrides=saved))))
    changes: Changes = {}
    for key in differing:
        if _differ(key, unchanged.get(key, UNSET), now[key]) or touched(key, typed):
            changes[key] = (before.get(key, UNSET), now[key])
        elif _may_be_recalled(key, before, now):
            OmegaConf.update(cfg, key, before[key])
        elif key not in before and _is_of_the_model(key, before, now):
            # An option that has come since: the class does without it what it did before.
            section, _, name = key.rpartition(".")
            with open_dict(cfg):
                del OmegaConf.select(cfg, section)[name]
    _refuse(changes, cfg.resume)
    return changes


def _differ(key: str, one: Any, other: Any) -> bool:
    kinds = type(one) is not type(other)
    return one != other or (kinds and (key in _COUNT_OR_SHARE or bool in (type(one), type(other))))


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option by its dotted name; a list is one option."""
    for key, value in config.items() if isinstance(config, Mapping) else ():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _may_be_recalled(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if key not in before or key.startswith("dataset.") or key.rpartition(".")[2].startswith("_"):
        return False
    return _class_of(key, before) == _class_of(key, now) and _is_value(before[key])


def _is_of_the_model(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether it is an option of a class that makes a part of the model, the same as until now."""
    kind = _class_of(key, now)
    return refusal(key) == _MODEL and kind is not None and kind == _class_of(key, before)


def _class_of(key: str, options: Mapping[str, Any]) -> Any:
    """The class that an option's section names; None without."""
    return options.get(f"{key.rpartition('.')[0]}._target_")


def _is_value(value: Any) -> bool:
    """Whether it is a value and nothing that OmegaConf or Hydra would make something else of."""
    if isinstance(value, list):
        return all(map(_is_value, value))
    if isinstance(value, str):
        return "${" not in value
    return value is None or isinstance(value, bool | int | float)


def _refuse(changes: Changes, resume: str) -> None:
    wrong = [key for key in changes if refusal(key) and changes[key][0] != UNSET]
    if wrong:
        names = ", ".join(f"{key}={changes[key][1]} (it has {changes[key][0]})" for key in wrong)
        raise UserError(
            f"{resume} cannot be resumed with {names}: {refusal(wrong[0])}. Leave that as it was, "
            "or start a new run."
        )


def refusal(key: str) -> str | None:
    """Why a run cannot change this option; None if it can."""
    if key in _ALLOWED:
        return None
    return REFUSED.get(key) or REFUSED.get(key.partition(".")[0])


class Beginning(Callback):
    """Calls `begin` when a run is about to take its first step, and a resumed one cannot be refused
    any more: nothing of a run is written before.

    Args:
        begin: called once, in every process.
        changes: the options that a resumed run changes.

    Attributes:
        data: what the checkpoints of this run keep of its data, see `imagegen.checkpoint`.
    """

    def __init__(self, begin: Callable[[], None], changes: Changes) -> None:
        self.begin = begin
        self.changes = changes
        self.data: Mapping[str, Any] = {}
        self.begun = False
        self._incomparable: list[Path] = []
        self._spent = False

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse a checkpoint from which training cannot continue; fit the callbacks' states."""
        assert isinstance(pl_module, ImageModule)
        if any(part not in checkpoint for part in ("loops", "callbacks", "lr_schedulers")):
            raise UserError(
                f"{trainer.ckpt_path} holds weights only, so no training can continue from it; "
                f"give a .ckpt file that {typed('train')} wrote."
            )
        loop = checkpoint["loops"]["fit_loop"]
        epochs = loop["epoch_progress"]["current"]["processed"]
        if trainer.max_epochs not in (None, -1) and epochs > trainer.max_epochs:
            raise UserError(
                f"{trainer.ckpt_path} has done {epochs} epochs already, more than "
                f"trainer.max_epochs={trainer.max_epochs}; raise that to train it further."
            )
        started = loop["epoch_progress"]["current"]["started"]
        if epochs == started and loop["epoch_loop.batch_progress"]["is_last_batch"]:
            end_no_epoch_twice(trainer)
        self._spent = (
            trainer.max_epochs not in (None, -1)
            and started >= trainer.max_epochs
            and loop["epoch_loop.batch_progress"]["is_last_batch"]
            and has_finished(Path(trainer.default_root_dir))
        )
        if any(key.startswith("optimizer.") for key in self.changes):
            for saved in checkpoint.get("optimizer_states", []):
                _try_optimizer(pl_module, saved)
        states = checkpoint["callbacks"]
        fit_states(trainer, states)
        if self._other_images(checkpoint):
            _forget_scores(trainer, states)
        self._incomparable = [
            path
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and callback.monitor is not None
            if callback.state_key not in states
            if (path := Path(str(callback.dirpath), f"{callback.filename}.ckpt")).is_file()
        ]

    def _other_images(self, checkpoint: Mapping[str, Any]) -> bool:
        """Whether validations score other images than those of the checkpoint."""
        if {"trainer.limit_val_batches", "trainer.overfit_batches"} & set(self.changes):
            return True
        before = (checkpoint[KEY].get("data") or {}).get("splits", {}).get("val")
        now = self.data.get("splits", {}).get("val")
        return None not in (before, now) and before["digest"] != now["digest"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, unless the run has already finished."""
        for callback in trainer.early_stopping_callbacks:
            trainer.should_stop |= self._still_stops(callback)
        # A validation at the end of the last epoch saves before Lightning counts that epoch.
        trainer.should_stop |= self._spent
        if trainer.fit_loop.done:
            return
        if _in_the_middle_of_an_epoch(trainer):
            self._refuse_another_epoch(trainer)
        self.begin()
        if trainer.is_global_zero:
            for path in self._incomparable:
                _keep_incomparable(path, trainer.global_step)
        self.begun = True

    def _still_stops(self, callback: EarlyStopping) -> bool:
        """Whether early stopping has ended the run, with the options that it has now."""
        if callback.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED:
            stops = callback.wait_count >= callback.patience
        else:
            changed = any(key.startswith("callbacks.") for key in self.changes)
            stops = callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED and not changed
        if not stops:
            callback.stopping_reason = EarlyStoppingReason.NOT_STOPPED
            callback.stopping_reason_message = None
        return stops

    def _refuse_another_epoch(self, trainer: Trainer) -> None:
        order = getattr(trainer.train_dataloader, "sampler", None)
        if isinstance(order, TrainOrder):
            order.check_restored()
        changed = [key for key in _WHOLE_EPOCHS if key in self.changes]
        if changed:
            was, now = self.changes[changed[0]]
            raise UserError(
                f"the checkpoint was saved in the middle of an epoch with {changed[0]}={was}, but "
                f"this run has {now}; resume with the same, or from a checkpoint saved at the end "
                "of an epoch."
            )


@rank_zero_only
def say_changes(step: int, changes: Changes) -> None:
    """Print where a resumed run continues, and with which changes."""
    texts = [f"{key}={now} ({before} until now)" for key, (before, now) in changes.items()]
    print(f"continues after step {step:,}{' with ' if texts else ''}{', '.join(texts)}", flush=True)


def _in_the_middle_of_an_epoch(trainer: Trainer) -> bool:
    batches = trainer.fit_loop.epoch_loop.batch_progress
    return trainer.fit_loop.restarting and batches.current.ready > 0 and not batches.is_last_batch


def _try_optimizer(module: ImageModule, saved: Mapping[str, Any]) -> None:
    """Take a step of one parameter of each group, whose gradient is zero, with the state kept.

    Some options need a state that an optimizer without them does not keep. Where processes share
    the state (FSDP), nothing is tried.
    """
    optimizer = build_optimizer(module.optimizer_factory, module.model)
    tried = []
    for group, before in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        parameter, index = group["params"][0], before["params"][0]
        state = saved["state"].get(index)
        if state is not None and isinstance(index, int):
            tried.append((parameter, parameter.detach().clone()))
            # Copied, since an optimizer writes into it.
            optimizer.state[parameter] = copy.deepcopy(state)
            parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    # What foreign code makes of a state that it does not expect may be any error.
    except Exception as error:
        raise UserError(
            "the optimizer cannot continue with these options from the state that the checkpoint "
            f"keeps ({type(error).__name__}: {error}); leave them as they were, or start a new run."
        ) from error
    finally:
        for parameter, weights in tried:
            parameter.grad = None
            parameter.data.copy_(weights)


def fit_states(trainer: Trainer, states: dict[str, Any]) -> None:
    """Fit the states of callbacks to their options and to the place where the run is now.

    What a callback was built with, such as the patience of early stopping, wins over the same thing
    in its state. The files that a `ModelCheckpoint` remembers are looked for where it writes now;
    without the best one, it begins afresh.

    Args:
        trainer: with its callbacks.
        states: by key, as a checkpoint holds them; changed in place.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint):
            _place(trainer, callback, states)
        state = states.get(callback.state_key, {})
        for name in inspect.signature(type(callback)).parameters:
            if name in state and hasattr(callback, name):
                state[name] = getattr(callback, name)


def _forget_scores(trainer: Trainer, states: dict[str, Any]) -> None:
    """Let the callbacks that compare validations begin again."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint | EarlyStopping):
            if str(callback.monitor).startswith("val/"):
                states.pop(callback.state_key, None)


def _keep_incomparable(path: Path, step: int) -> None:
    """Keep a best checkpoint whose score cannot be compared with those to come, and say so."""
    kept = path.with_name(f"{path.stem}-before-step-{step}{path.suffix}")
    shutil.copy2(path, kept)
    print(
        f"validations are compared anew from here on, so the best checkpoint until now is kept as "
        f"{kept.name}",
        flush=True,
    )


def _place(trainer: Trainer, callback: ModelCheckpoint, states: dict[str, Any]) -> None:
    key = callback.state_key
    if key not in states:
        # Lightning's key says how often it saves, too, which may have changed.
        same = f"{type(callback).__name__}{{'monitor': {callback.monitor!r}, 'mode': "
        same += f"{callback.mode!r}, "
        taken = {other.state_key for other in trainer.checkpoint_callbacks}
        found = [other for other in states if other.startswith(same) and other not in taken]
        if len(found) != 1:
            return
        states[key] = states.pop(found[0])
    state, folder = states[key], Path(str(callback.dirpath))

    def here(path: str) -> str:
        """Where a remembered file is now; empty if it is not there."""
        old = Path(str(state.get("dirpath")))
        if path and Path(path).is_relative_to(old):
            path = str(folder / Path(path).relative_to(old))
        return path if path and callback.file_exists(path, trainer) else ""

    best = here(state["best_model_path"])
    if not best:
        del states[key]
        return
    state["best_model_path"] = best
    for name in ("kth_best_model_path", "last_model_path"):
        state[name] = here(state.get(name, ""))
    kept = {here(path): score for path, score in state.get("best_k_models", {}).items()}
    state["best_k_models"] = {path: score for path, score in kept.items() if path}
