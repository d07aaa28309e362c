"""Checkpoints: Lightning's own files, with all that sampling needs to know inside.

A checkpoint keeps plain numbers, strings and tensors only. It is read with `weights_only=True`,
and the classes its configuration names are looked up in this package alone, so reading one never
runs code from it. The folder that `imagegen export
format=safetensors` writes holds the same without what training needs, and is read in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from imagegen.checkpoint import weights_folder
from imagegen.checkpoint.file import is_modest, not_ours, read_checkpoint_file
from imagegen.checkpoint.fit import check_fit, misfit
from imagegen.core.errors import UserError
from imagegen.core.installation import typed
from imagegen.core.moved import with_current_names
from imagegen.core.spec import ImageSpec
from imagegen.model.transformer import ImageTransformer, known_options

FORMAT_VERSION = 1
KEY = "imagegen"
MAX_ENTRIES = {"model": 2_000, "config": 50_000}
"""The most that a description may hold; that of a usual run has some dozens and some hundreds."""

_WEIGHTS = "model."
REQUIRED = ("format_version", "model", "spec", "dataset", "config", "overrides")
_CANDIDATES = (
    "checkpoints/best.ckpt",
    "checkpoints/last.ckpt",
    "best.ckpt",
    "last.ckpt",
    weights_folder.WEIGHTS,
)


@dataclass
class LoadedCheckpoint:
    """A model ready to draw, and what its checkpoint says about it.

    Attributes:
        model: in evaluation mode, on the chosen device.
        path: the file.
        metadata: `format_version`, `spec`, and as plain containers `model`, `dataset`, `config`
            (the run's resolved configuration), `overrides` (what the user had typed) and, since
            version 0.2, `machine` (see `imagegen.core.machine.describe`, and `precision`).
    """

    model: ImageTransformer
    path: Path
    metadata: dict[str, Any]

    @property
    def class_names(self) -> list[str]:
        """Of the classes that the model knows, numbers where they have no names; may be empty."""
        known = range(self.model.n_classes or 0)
        return list((self.metadata.get("class_names") if known else None) or map(str, known))


def make_metadata(
    spec: ImageSpec,
    model: Mapping[str, Any],
    dataset: Mapping[str, Any],
    config: Mapping[str, Any],
    overrides: list[str],
    machine: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a checkpoint of ours holds under the key `imagegen`; see `LoadedCheckpoint`."""
    return {
        "format_version": FORMAT_VERSION,
        "spec": spec.to_dict(),
        "model": dict(model),
        "dataset": dict(dataset),
        "config": dict(config),
        "overrides": list(overrides),
        "machine": None if machine is None else dict(machine),
    }


def resolve_checkpoint(path: str | Path) -> Path:
    """The checkpoint file that `path` means: itself, or a run folder's best, else its last.

    Of an exported folder it is the file of weights.

    Raises:
        UserError: if there is none.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return path
    if not path.exists():
        raise UserError(f"the checkpoint {path} does not exist; give a .ckpt file or a run folder.")
    for candidate in _CANDIDATES:
        if (path / candidate).is_file():
            return path / candidate
    if (path / weights_folder.CONFIG).is_file():
        raise UserError(
            f"the folder {path} holds {weights_folder.CONFIG}, but not the {weights_folder.WEIGHTS}"
            " that was exported with it; copy both."
        )
    raise UserError(
        f"the folder {path} holds no {_CANDIDATES[0]} and no {_CANDIDATES[1]}; "
        "give a .ckpt file or the folder of a run that has validated at least once."
    )


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What the checkpoint at `path` says about itself; see `LoadedCheckpoint`.

    Raises:
        UserError: if the file cannot be read, is truncated, or is not a checkpoint of ours.
    """
    path = Path(path)
    if path.suffix == weights_folder.SUFFIX:
        return _metadata(weights_folder.read_config(path), path)
    return _metadata(read_checkpoint_file(path).get(KEY), path)


def read_resume_state(path: str | Path) -> dict[str, Any]:
    """What is needed to continue from the checkpoint at `path`.

    Returns:
        `step`, optimizer steps done; `metadata`; `precision`, in which it has trained, None where
        an earlier version did not record it; and what the loggers keep, such as `wandb_id`.

    Raises:
        UserError: as `read_metadata`.
    """
    path = Path(path)
    if path.suffix == weights_folder.SUFFIX:
        raise UserError(
            f"{path} holds weights only, so no training can continue from it; give a .ckpt file "
            f"that {typed('train')} wrote."
        )
    content = read_checkpoint_file(path)
    metadata = _metadata(content.get(KEY), path)
    logger, step = metadata.get("logger", {}), content.get("global_step", 0)
    if not isinstance(logger, dict) or not isinstance(step, int):
        raise UserError(f"{path} is damaged: it does not say how far its training has come.")
    machine = metadata.get("machine") or {}
    precision = machine.get("precision") if isinstance(machine, dict) else machine
    if precision is not None and not isinstance(precision, str):
        raise UserError(f"{path} is damaged: it does not say in which precision it was trained.")
    return {**logger, "step": step, "metadata": metadata, "precision": precision}


def load_checkpoint(path: str | Path, device: str | torch.device = "cpu") -> LoadedCheckpoint:
    """The model of a checkpoint file or a run folder.

    Raises:
        UserError: if there is none, it cannot be read, is truncated, or is not one of ours.
    """
    path = resolve_checkpoint(path)
    metadata, weights = _content(path)
    spec, options = ImageSpec.from_dict(metadata["spec"]), _known(metadata["model"], path)
    check_fit(spec, options, weights, path)
    model = ImageTransformer.from_options(spec, **options)
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise misfit(path, "its tensors cannot be copied") from error
    return LoadedCheckpoint(model.to(device).eval(), path, metadata)


def _known(options: Mapping[str, Any], path: Path) -> dict[str, Any]:
    parameters = known_options()
    unknown = [name for name in options if name not in parameters]
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in options
    ]
    if unknown or missing:
        raise UserError(
            f"{path} describes a model that this version does not know: "
            + "; ".join(
                f"{what} {', '.join(names)}"
                for what, names in (("unknown", unknown), ("missing", missing))
                if names
            )
            + "; use the version of imagegen that wrote it, or a newer one."
        )
    return dict(options)


def _content(path: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Metadata and weights of a file; the weights' values may be anything."""
    if path.suffix == weights_folder.SUFFIX:
        return read_metadata(path), weights_folder.read_weights(path)
    content = read_checkpoint_file(path)
    metadata = _metadata(content.get(KEY), path)
    state = content.get("state_dict")
    if not isinstance(state, dict):
        raise not_ours(path)
    weights = {
        key.removeprefix(_WEIGHTS): value
        for key, value in state.items()
        if isinstance(key, str) and key.startswith(_WEIGHTS)
    }
    return metadata, weights


def _metadata(metadata: object, path: Path) -> dict[str, Any]:
    if not isinstance(metadata, dict):
        raise not_ours(path)
    version = metadata.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise UserError(
            f"{path} has checkpoint format {version}, newer than the {FORMAT_VERSION} that this "
            "version reads; update imagegen."
        )
    missing = [key for key in REQUIRED if key not in metadata]
    if missing:
        raise UserError(f"{path} is damaged: it lacks {', '.join(missing)}.")
    sections = all(isinstance(metadata[key], dict) for key in ("model", "spec"))
    modest = all(is_modest(metadata[key], MAX_ENTRIES.get(key, 5_000)) for key in REQUIRED)
    if type(version) is not int or not sections or not modest:
        raise UserError(f"{path} is damaged: what it says of its model is not a set of options.")
    naming = ("model", "dataset", "config")
    return {**metadata, **{key: with_current_names(metadata[key]) for key in naming}}
