"""Where metrics and images go: always to metrics.csv, and to wandb or TensorBoard if chosen."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from packaging.version import Version
from pytorch_lightning.loggers import Logger, TensorBoardLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from imagegen.core.build import check_section
from imagegen.core.errors import UserError
from imagegen.core.processes import is_first_process
from imagegen.tracking.metrics_file import MetricsFile
from imagegen.tracking.metrics_rows import read_rows
from imagegen.tracking.wandb_file import last_wandb_step
from imagegen.tracking.wandb_run import WandbRun

_START_SECONDS = 30
"""How long wandb may try to reach its server before the run continues offline."""
_OFFLINE = ("offline", "dryrun")
_WORDS = ("project", "entity", "name", "group", "notes", "id", "job_type")
_FINISH_SECONDS = 600
"""How long wandb may upload after a run; what is left stays in the run folder."""


def check_logger(options: Mapping[str, Any] | None) -> None:
    """Refuse options of a wrong kind before a run begins; wandb tells the rest itself, later.

    Args:
        options: the logger section of the configuration.

    Raises:
        UserError: naming the option.
    """
    options = options or {}
    check_section("logger", options)
    upload = options.get("log_model", False)
    if not isinstance(upload, bool) and upload != "all":
        raise UserError(f"logger.log_model={upload} must be true, false or all.")


def build_loggers(
    options: Mapping[str, Any] | None,
    run_dir: Path,
    config: Mapping[str, Any],
    resume_state: Mapping[str, Any] | None = None,
) -> list[Logger]:
    """The loggers of a run: `metrics.csv` in the run folder, and the one chosen, if any.

    Args:
        options: the logger section of the configuration; without a `_target_` it adds nothing.
            A `_target_` in this module also gets `run_dir`, `config` and `resume_state`.
        run_dir: the run folder, which exists.
        config: the resolved configuration as plain containers, recorded with the run.
        resume_state: for a resumed run, `step` (the checkpoint's global step, optimizer steps done)
            and what `logger_state` gave when the checkpoint was written.

    Raises:
        UserError: if the chosen logger is not installed.
    """
    state = dict(resume_state or {})
    loggers: list[Logger] = [MetricsFile(run_dir, state.get("step"))]
    options = {} if options is None else dict(options)
    target = options.get("_target_")
    if target is not None:
        from hydra.utils import instantiate

        ours = str(target).startswith(f"{__name__}.")
        given = {"run_dir": run_dir, "config": config, "resume_state": state} if ours else {}
        # Given to the partial: Hydra would build the classes that `config` names.
        chosen = instantiate(options, _partial_=True, _convert_="all")(**given)
        if chosen is not None:
            loggers.append(chosen)
    return loggers


def logger_state(loggers: Iterable[Logger]) -> dict[str, str]:
    """What a checkpoint must keep so that a resumed run continues in the same wandb run."""
    for logger in loggers:
        if isinstance(logger, WandbRun) and logger.version:
            return {"wandb_id": str(logger.version)}
    return {}


@rank_zero_only
def log_images(
    loggers: Iterable[Logger], key: str, image: UInt8[np.ndarray, "h w c"], step: int
) -> None:
    """Log one image, pixel for pixel, wherever the logger can hold images.

    Args:
        loggers: as `build_loggers` returns them.
        key: its name, "val/samples".
        image: 0 to 255, grey (one channel) or RGB.
        step: optimizer steps done.
    """
    for logger in loggers:
        if isinstance(logger, WandbRun):
            # Lightning counts the metrics of a step from 0.
            logger.log_pixels(key, image, max(0, step - 1))
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(key, image, step, dataformats="HWC")


@rank_zero_only
def close_loggers(
    loggers: Iterable[Logger], success: bool = True, steps: int | None = None
) -> None:
    """Finish what Lightning leaves open, so that a following run starts afresh.

    Args:
        loggers: as `build_loggers` returns them.
        success: whether the run ended well; wandb marks it as failed otherwise.
        steps: optimizer steps done, if known; wandb gets no part of a step that was not.
    """
    for logger in loggers:
        logger.finalize("success" if success else "failed")
        if isinstance(logger, WandbRun):
            logger.finish(success, steps)


def wandb_logger(
    run_dir: Path,
    config: Mapping[str, Any],
    resume_state: Mapping[str, Any],
    log_model: bool | str = False,
    tags: Any = None,
    **options: Any,
) -> WandbRun | None:
    """A started wandb run: online where there is a login, else offline; never asks for anything.

    WANDB_MODE decides if it is set. A server that does not answer makes the run continue offline;
    if wandb cannot start at all, training continues without it. Each of these is told in one line.

    Args:
        run_dir: the run folder; wandb writes below `wandb/` in it.
        config: recorded with the run.
        resume_state: with `wandb_id`, the run to continue, and `step`, the first of its new rows.
        log_model: True uploads `best` and `last` at the end, "all" each when it is written.
        tags: of the run; a list of words, or one.
        options: arguments of `wandb.init`: project, entity, name, group, notes…

    Returns:
        The logger, or None without wandb.
    """
    if not is_first_process():
        return WandbRun(None, run_dir)
    import wandb

    several = tags if isinstance(tags, list | tuple) else [] if tags is None else [tags]
    options["tags"] = [str(tag) for tag in several]
    for name in _WORDS:
        if isinstance(options.get(name), int | float):  # A word that Hydra took for a number
            options[name] = str(options[name])

    def start(mode: str) -> WandbRun:
        settings = wandb.Settings(silent=mode != "online", reinit="finish_previous")
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            settings.init_timeout = _START_SECONDS
        if "WANDB_FINISH_TIMEOUT" not in os.environ and hasattr(settings, "finish_timeout"):
            settings.finish_timeout = _FINISH_SECONDS
        given = {"dir": run_dir, "mode": mode, "id": resume_state.get("wandb_id"), **options}
        # Before 0.31, wandb warns that it ignores `resume` in a run that is kept offline.
        ignored = mode in _OFFLINE and Version(wandb.__version__) < Version("0.31")
        # Started here, not by Lightning, which warns of settings that it makes itself.
        run = wandb.init(resume=None if ignored else "allow", settings=settings, **given)
        run.config.update(dict(config), allow_val_change=True)
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return WandbRun(run, run_dir, options.get("project"), log_model)

    written = last_wandb_step(run_dir, str(resume_state.get("wandb_id")))
    mode = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
    why = "" if "WANDB_MODE" in os.environ else "no login found, so "
    for attempt in dict.fromkeys((mode, "offline")):
        try:
            logger = start(attempt)
        except Exception as error:  # Whatever is wrong there, it must not stop a training run.
            why = f"it could not start ({_refusal(error, options)}), so "
            continue
        if written is not None:
            # What wandb had not written yet when the run was killed.
            logger.go_on(written, read_rows(run_dir / "metrics.csv", resume_state.get("step")))
        if attempt in _OFFLINE:
            folder = shlex.quote(str(Path(logger.experiment.dir).parent))
            print(f"wandb: {why}this run is kept offline; upload it later: wandb sync {folder}")
        return logger
    print(f"wandb: {why}the run continues without it", file=sys.stderr)
    return None


def tensorboard_logger(
    run_dir: Path,
    config: Mapping[str, Any],
    resume_state: Mapping[str, Any],
    **options: Any,
) -> TensorBoardLogger:
    """A TensorBoard logger that writes below `tensorboard/` in the run folder.

    Args:
        run_dir: the run folder.
        config: recorded as text.
        resume_state: with `step`, later events of the run resumed are hidden.
        options: further arguments of `TensorBoardLogger`.

    Raises:
        UserError: if TensorBoard is not installed.
    """
    step = resume_state.get("step")
    if step is not None:
        options["purge_step"] = step
    try:
        logger = TensorBoardLogger(
            run_dir, name="", version="tensorboard", default_hp_metric=False, **options
        )
        if is_first_process() and step is None:
            import yaml

            text = yaml.safe_dump(dict(config), sort_keys=False)
            logger.experiment.add_text("config", "\n".join(f"    {s}" for s in text.splitlines()))
    except ImportError as error:
        raise UserError(
            "logger=tensorboard needs the package tensorboard; install it with "
            "`pip install tensorboard`, or choose logger=csv."
        ) from error
    return logger


def _logged_in() -> bool:
    """Whether wandb finds credentials, without asking for any or calling a server."""
    import wandb

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # Before wandb 0.23
        return bool(wandb.api.api_key)
    except Exception:  # A broken ~/.netrc, for instance
        return False


def _refusal(error: Exception, options: Mapping[str, Any]) -> str:
    """What wandb says in its first line, after the option or variable that it is about, if any."""
    problems = getattr(error, "errors", None)
    if callable(problems):  # pydantic's, whose first line only counts them
        problem = problems()[0]
        field, said = ".".join(map(str, problem["loc"])), str(problem["msg"])
        words, refused = {field.removeprefix("run_")}, str(problem["input"])
    else:
        lines = str(error).strip().splitlines()
        said = lines[0] if lines else type(error).__name__
        words, refused = set(re.findall(r"\w+", said.lower())), None
    # What is typed counts before what the environment says.
    given = [
        (name, f"logger.{name}", value) for name, value in options.items() if value is not None
    ]
    given += [
        (name.removeprefix("WANDB_").lower().removeprefix("run_"), name, value)
        for name, value in os.environ.items()
        if name.startswith("WANDB_") and not re.search("KEY|TOKEN", name)
    ]
    found = [(full, str(value)) for name, full, value in given if name in words]
    found += [(full, str(value)) for _, full, value in given if str(value) == refused]
    found.sort(key=lambda pair: (pair[1] != refused, pair[1] not in said))
    subject = "".join(f"{full}={value[:60]}: " for full, value in found[:1])
    return f"{subject}{said[:200]}"
