"""Tell a user what went wrong: one sentence for their mistakes, a traceback for a bug."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from imagegen.core.errors import UserError

_RUN_FOLDER = "hydra.runtime.output_dir"
_HINT = "IMAGEGEN_DEBUG=1 shows where"
_DISK_ERRORS = {
    getattr(errno, name)
    for name in (
        "ENOSPC EDQUOT EROFS EACCES EPERM ENOTDIR EISDIR EFBIG ENAMETOOLONG ELOOP EIO".split()
    )
    if hasattr(errno, name)
}


def report(error: BaseException, job: str = "") -> None:
    """Print a user's mistake as a sentence, anything else as the traceback that it deserves."""
    sentence = sentence_for(error)
    place = f" in the run with {job}" if job else ""
    if sentence is None:
        traceback.print_exception(error)
        if place:
            print(f"error{place}: see above", file=sys.stderr)
    else:
        print(f"error{place}: {_shown(sentence)}", file=sys.stderr)


def _shown(sentence: str) -> str:
    """In one line and harmless to a terminal, whatever was typed and is quoted in it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)


def sentence_for(error: BaseException) -> str | None:
    """The sentence that tells a user what to change, or None for a bug of ours."""
    for cause in _causes(error):
        if isinstance(cause, UserError):
            return str(cause)
    for cause in _causes(error):
        kind, text = type(cause).__name__, " ".join(str(cause).split())
        if kind == "MisconfigurationException":
            if "backend found" in text or "gpu" in text.lower():
                return f"no usable GPU: {text} Choose trainer=cpu, or trainer.devices to fit."
            return f"the trainer rejects its settings: {text}"
        if kind == "OutOfMemoryError":
            return "the GPU's memory is full; choose a smaller batch_size or model."
        if isinstance(cause, MemoryError) or "can't allocate memory" in text:
            return "this machine's memory does not suffice; choose a smaller batch_size or model."
        if isinstance(cause, OSError) and cause.errno in _DISK_ERRORS:
            return _disk_sentence(cause)
        if isinstance(cause, RuntimeError) and "PytorchStreamWriter failed" in text:
            return f"cannot write a checkpoint{_below_run_folder()}; is the disk full?"
    return _config_sentence(error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _disk_sentence(error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    if error.filename is not None:
        return f"cannot use {os.fspath(error.filename)}: {reason}."
    return f"cannot write{_below_run_folder()}: {reason}."


def _below_run_folder() -> str:
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    config: Any = HydraConfig.instance().cfg
    folder = None if config is None else OmegaConf.select(config, _RUN_FOLDER)
    return f" below {folder}" if folder else ""


def _config_sentence(error: BaseException) -> str | None:
    """A sentence for what Hydra refuses, and for options that a class refuses when it is built."""
    from hydra.errors import HydraException, InstantiationException

    from imagegen.cli.override_checks import message

    if isinstance(error, InstantiationException):
        cause = error.__cause__
        section = str(error).rpartition("full_key: ")[2].strip() if "full_key" in str(error) else ""
        refused = f"{section or 'the configuration'} is refused"
        text = message(error)
        # What foreign code makes of an option that it does not expect may be any error.
        foreign = re.search(r"call to target '(?!imagegen\.)", str(error)) is not None
        if isinstance(cause, (TypeError, ValueError)) or (cause is not None and foreign):
            if not text.startswith("Error locating target"):
                return f"{refused}: {message(cause) or type(cause).__name__} ({_HINT})."
        # Hydra's own refusals, of what a _target_ names.
        if cause is None or text.startswith("Error locating target"):
            return f"{refused}: {text.partition(', set env var')[0]}."
        return None
    return f"{message(error)}." if isinstance(error, HydraException) else None
