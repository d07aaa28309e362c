"""Continue an interrupted run: `python train.py resume=latest`.

The overrides that the run was started with are kept in its checkpoint, so nothing has to be typed
again; what is typed now comes on top. The run continues in its own folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imagegen.core.errors import UserError
from imagegen.core.installation import PROJECT_ROOT
from imagegen.core.override_syntax import parse_override, quote
from imagegen.training.run_folder import AUTO, LAST, run_folder_of

# Classes of ours, and those that choose how to optimize and what to watch.
_TRUSTED = re.compile(
    r"[\w.+]*\._target_="
    r"(imagegen(\.[a-z_0-9]+)+|torch\.optim|pytorch_lightning\.(callbacks|loggers))\.[A-Z]\w*"
)


def rewrite_resume(argv: Sequence[str]) -> list[str]:
    """The arguments with `resume=` replaced by what it means.

    They become: the overrides kept in the checkpoint that are not overridden now, with the folders
    of its data as absolute paths, those typed now,
    `resume=<checkpoint file>` and, where the checkpoint is in a run folder and none is typed,
    `hydra.run.dir=<run folder>`. Without `resume=`, or with `resume=auto`, nothing changes;
    rewriting again changes no meaning. Relative paths are relative to the working directory.

    Args:
        argv: the arguments typed, without the program's name.

    Raises:
        UserError: if there is nothing to resume, with --multirun, or if the checkpoint asks for
        code from elsewhere.
    """
    typed = {index: parsed for index, text in enumerate(argv) if (parsed := parse_override(text))}
    chosen = [index for index, parsed in typed.items() if parsed.key_or_group == "resume"]
    if not chosen or typed[chosen[-1]].value() in (None, AUTO):
        return list(argv)
    multirun = any(text in ("-m", "--multirun", "hydra.mode=MULTIRUN") for text in argv)
    if multirun or typed[chosen[-1]].is_sweep_override():
        raise UserError("resume= continues one run; leave out --multirun and give one checkpoint.")

    # OmegaConf's escape for a path that holds ${...}; `quote` writes it.
    checkpoint = find_checkpoint(str(typed[chosen[-1]].value()).replace("\\${", "${"))
    added = [f"resume={quote(str(checkpoint))}"]
    run_folder = run_folder_of(checkpoint)
    if run_folder and not any(p.key_or_group == "hydra.run.dir" for p in typed.values()):
        added.append(f"hydra.run.dir={quote(str(run_folder))}")
    new = [parsed for index, parsed in typed.items() if index not in chosen]
    metadata = _read(checkpoint)
    placed = _data_options(metadata, new)
    new += [parsed for text in placed if (parsed := parse_override(text))]
    saved = [text for text in _saved_overrides(metadata) if not _replaced(text, new)]
    for text in saved:
        _refuse_foreign_code(text, checkpoint)

    # Hydra wants all overrides in one place, among its own flags.
    first = min(typed)
    kept = [text for index, text in enumerate(argv) if index >= first and index not in chosen]
    return [*argv[:first], *saved, *placed, *added, *kept]


def find_checkpoint(what: str) -> Path:
    """The checkpoint file, absolute, that `latest`, a run folder or a checkpoint file names.

    Raises:
        UserError: if there is none; it says where it looked.
    """
    if not what:
        raise UserError("resume= is empty; give latest, a run folder or a checkpoint file.")
    if what == "latest":
        return _latest()
    path = Path(what).expanduser().absolute()
    if path.is_file():
        return path
    if not path.exists():
        raise UserError(
            f"resume={what}: {path} does not exist; give latest, a run folder or a checkpoint file."
        )
    for candidate in (path / LAST, path / LAST.name):
        if candidate.is_file():
            return candidate
    raise UserError(f"resume={what}: the folder holds no {LAST}, so there is nothing to resume.")


def _read(checkpoint: Path) -> Mapping[str, Any]:
    from imagegen.checkpoint.reading import read_metadata

    return read_metadata(checkpoint)


def _saved_overrides(metadata: Mapping[str, Any]) -> list[str]:
    return [str(text) for text in metadata.get("overrides") or []]


def _data_options(metadata: Mapping[str, Any], new: Sequence[Any]) -> list[str]:
    """Overrides that find the checkpoint's data from any working directory."""
    from imagegen.checkpoint.training_data import resume_overrides

    options = resume_overrides(metadata)
    typed = {parsed.key_or_group for parsed in new}
    if "dataset" in typed:  # another data set may lack them
        parsed = filter(None, map(parse_override, _saved_overrides(metadata)))
        saved = {override.key_or_group for override in parsed}
        options = {name: value for name, value in options.items() if name in saved}
    return [f"{name}={quote(value)}" for name, value in options.items() if name not in typed]


def _refuse_foreign_code(text: str, checkpoint: Path) -> None:
    """A checkpoint may come from anywhere: what runs other code has to be typed by its user."""
    hydras = text.lstrip("+~").startswith("hydra")
    if hydras or ("_target_" in text and not _TRUSTED.fullmatch(text)):
        raise UserError(
            f"{checkpoint} asks for {text}, which may run any code; if you trust it, type it again "
            "beside resume=."
        )


def _replaced(text: str, new: Sequence[Any]) -> bool:
    """Whether a saved override gives way to one typed now."""
    saved = parse_override(text)
    if saved is None or saved.key_or_group == "resume":
        return True
    return any(
        (saved.key_or_group, saved.package) == (typed.key_or_group, typed.package)
        # What was added with + must be added again before it can be changed.
        and (typed.is_add() or typed.is_force_add() or not saved.is_add())
        for typed in new
    )


def _latest() -> Path:
    outputs = PROJECT_ROOT / "outputs"
    found = []
    for folder, folders, _ in os.walk(outputs):
        if LAST.parent.name in folders and (Path(folder) / LAST).is_file():
            found.append(Path(folder) / LAST)
        skip = {LAST.parent.name, "samples", "wandb", ".hydra"}
        folders[:] = [name for name in folders if name not in skip]
    if not found:
        raise UserError(
            f"resume=latest: there is no {LAST} in any folder below {outputs}; "
            "give a run folder or a checkpoint file."
        )
    return max(found, key=lambda path: path.stat().st_mtime)
