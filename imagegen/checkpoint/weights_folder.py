"""Weights in safetensors and their description in JSON: a folder that other programs read too.

model.safetensors    the weights, under the names that the model gives them
config.json          what the checkpoint says of them; see `reading.LoadedCheckpoint`
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from imagegen.core.errors import UserError
from imagegen.core.files import staged_folder

SUFFIX = ".safetensors"
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
MAX_HEADER = 1 << 24
MAX_CONFIG = 1 << 22


def write_weights_folder(
    folder: Path, metadata: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> None:
    """Write both files, or neither; an earlier pair is replaced.

    Args:
        folder: a new or empty folder, or one with an earlier pair.
        metadata: plain containers, as in a checkpoint.
        weights: tensors by the model's names for them.

    Raises:
        UserError: if the folder holds anything else or cannot be written.
    """
    from safetensors.torch import save

    with staged_folder(folder, owned=(WEIGHTS, CONFIG)) as staging:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        # Other programs refuse files that do not say so.
        content = save(plain, metadata={"format": "pt"})
        # Not by safetensors, which tells nobody what kind of error a full disk is.
        (staging / WEIGHTS).write_bytes(content)
        (staging / CONFIG).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def read_config(weights: Path) -> dict[str, Any]:
    """The description in the `config.json` next to the file `weights`.

    Raises:
        UserError: if it is missing, or is not a description.
    """
    path = weights.with_name(CONFIG)
    broken = UserError(f"{path} does not describe a model of imagegen; export the model again.")
    try:
        if path.stat().st_size > MAX_CONFIG:
            raise broken
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{weights} needs the {CONFIG} that was exported with it, but there is none in its "
            "folder; copy both."
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise broken from error
    if not isinstance(config, dict):
        raise broken
    return config


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU; they stay in the file until they are used.

    Raises:
        UserError: if it cannot be read, is truncated, or is of another format.
    """
    import safetensors

    damaged = UserError(
        f"{path} is truncated or damaged, or is not a safetensors file; use another."
    )
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            beginning = file.read(8)
        # The library would take what the header claims before it looks further.
        if len(beginning) < 8 or struct.unpack("<Q", beginning)[0] > min(size - 8, MAX_HEADER):
            raise damaged
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from error
    except (safetensors.SafetensorError, RuntimeError, ValueError, TypeError) as error:
        raise damaged from error
