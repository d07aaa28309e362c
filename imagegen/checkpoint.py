"""Checkpoints: Lightning's own files, with all that sampling needs to know inside.

A checkpoint keeps plain numbers, strings and tensors only. It is read with `weights_only=True`,
and the classes its configuration names are looked up in this package alone, so reading one never
runs code from it.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imagegen.errors import UserError
from imagegen.model import ImageTransformer
from imagegen.spec import ImageSpec

FORMAT_VERSION = 1
KEY = "imagegen"
_WEIGHTS = "model."
_REQUIRED = ("format_version", "model", "spec", "dataset", "config", "overrides")
_CANDIDATES = ("checkpoints/best.ckpt", "checkpoints/last.ckpt", "best.ckpt", "last.ckpt")


@dataclass
class LoadedCheckpoint:
    """A model ready to draw, and what its checkpoint says about it.

    Attributes:
        model: in evaluation mode, on the device asked for.
        path: the file.
        metadata: `format_version`, `spec`, and as plain containers `model`, `dataset`, `config`
            (the run's resolved configuration) and `overrides` (what the user had typed).
    """

    model: ImageTransformer
    path: Path
    metadata: dict[str, Any]


def make_metadata(
    spec: ImageSpec,
    model: Mapping[str, Any],
    dataset: Mapping[str, Any],
    config: Mapping[str, Any],
    overrides: list[str],
) -> dict[str, Any]:
    """What a checkpoint of ours holds under the key `imagegen`; see `LoadedCheckpoint`."""
    return {
        "format_version": FORMAT_VERSION,
        "spec": spec.to_dict(),
        "model": dict(model),
        "dataset": dict(dataset),
        "config": dict(config),
        "overrides": list(overrides),
    }


def resolve_checkpoint(path: str | Path) -> Path:
    """The checkpoint file that `path` means: itself, or a run folder's best, else its last.

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
    raise UserError(
        f"the folder {path} holds no {_CANDIDATES[0]} and no {_CANDIDATES[1]}; "
        "give a .ckpt file or the folder of a run that has validated at least once."
    )


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What the checkpoint at `path` says about itself; see `LoadedCheckpoint`.

    Raises:
        UserError: if the file cannot be read, is truncated, or is not a checkpoint of ours.
    """
    return _metadata(_read(Path(path), "cpu"), Path(path))


def read_resume_state(path: str | Path) -> dict[str, Any]:
    """What is needed to go on from the checkpoint at `path`.

    Returns:
        `step`, optimizer steps done; `metadata`; and what the loggers keep, such as `wandb_id`.

    Raises:
        UserError: as `read_metadata`.
    """
    content = _read(Path(path), "cpu")
    metadata = _metadata(content, Path(path))
    logger = metadata.get("logger", {})
    return {**logger, "step": int(content.get("global_step", 0)), "metadata": metadata}


def load_checkpoint(path: str | Path, device: str | torch.device = "cpu") -> LoadedCheckpoint:
    """The model of a checkpoint file or a run folder.

    Raises:
        UserError: if there is none, it cannot be read, is truncated, or is not one of ours.
    """
    path = resolve_checkpoint(path)
    content = _read(path, device)
    metadata = _metadata(content, path)
    model = ImageTransformer(ImageSpec.from_dict(metadata["spec"]), **_known(metadata["model"]))
    weights: dict[str, Tensor] = {
        key.removeprefix(_WEIGHTS): value
        for key, value in content["state_dict"].items()
        if key.startswith(_WEIGHTS)
    }
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise UserError(
            f"the weights in {path} do not fit the model that it describes; it was changed or "
            "written by another version."
        ) from error
    return LoadedCheckpoint(model.to(device).eval(), path, metadata)


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    import inspect

    parameters = inspect.signature(ImageTransformer).parameters
    unknown = [name for name in options if name not in parameters]
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in (*options, "spec")
    ]
    if unknown or missing:
        raise UserError(
            "the model's description is not one that this version knows: "
            + "; ".join(
                f"{what} {', '.join(names)}"
                for what, names in (("unknown", unknown), ("missing", missing))
                if names
            )
            + "."
        )
    return dict(options)


def _read(path: Path, device: str | torch.device) -> Mapping[str, Any]:
    foreign = UserError(
        f"{path} is not a checkpoint of imagegen; give a .ckpt file that train.py wrote."
    )
    try:
        with open(path, "rb") as file:
            beginning = file.read(4)
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {path}: {error.strerror or error}.") from error
    if beginning != b"PK\x03\x04":
        raise foreign
    try:
        content = torch.load(
            path, map_location=device, weights_only=True, mmap=str(device) == "cpu"
        )
    except pickle.UnpicklingError as error:
        raise foreign from error
    except (RuntimeError, EOFError, OSError, ValueError, zipfile.BadZipFile, KeyError) as error:
        if zipfile.is_zipfile(path):
            raise foreign from error
        raise UserError(
            f"the checkpoint {path} is truncated or damaged; use another one, such as the run's "
            "last.ckpt."
        ) from error
    if not isinstance(content, dict):
        raise foreign
    return content


def _metadata(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    metadata = content.get(KEY)
    if not isinstance(metadata, dict) or not isinstance(content.get("state_dict"), dict):
        raise UserError(
            f"{path} is not a checkpoint of imagegen; give a .ckpt file that train.py wrote."
        )
    version = metadata.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise UserError(
            f"{path} has checkpoint format {version}, newer than the {FORMAT_VERSION} that this "
            "version reads; update imagegen."
        )
    missing = [key for key in _REQUIRED if key not in metadata]
    if missing:
        raise UserError(f"{path} is damaged: it lacks {', '.join(missing)}.")
    return metadata
