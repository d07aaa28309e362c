"""Read the files that a checkpoint is kept in, trusting nothing they say.

A file may come from anywhere. It is looked at before it is read: nothing that it holds is run, and
no more memory is taken than the file itself is long.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from imagegen.core.errors import UserError
from imagegen.core.installation import typed

MAX_PICKLE = 1 << 26

# What a checkpoint of tensors, numbers and containers names. `weights_only` accepts a little more:
# bytearray(10**12), for instance, takes that much memory.
_NAMES = re.compile(
    r"collections (OrderedDict|Counter)"
    r"|builtins (set|complex)"
    r"|torch (Size|device|\w+Storage|(b?float|q?u?int|bool|complex)\w*)"
    r"|torch\.storage \w+Storage"
    r"|torch\.nn\.parameter Parameter"
    r"|torch\._utils _rebuild_(tensor_v2|parameter|parameter_with_state)"
    r"|torch\.serialization _get_layout"
)
_ZIP = b"PK\x03\x04"


def read_checkpoint_file(path: Path) -> Mapping[str, Any]:
    """What a `.ckpt` file holds; its tensors stay in the file until they are used.

    Raises:
        UserError: if it cannot be read, is truncated, or holds anything else than tensors, numbers,
            strings and plain containers.
    """
    foreign = not_ours(path)
    try:
        with open(path, "rb") as file:
            beginning = file.read(len(_ZIP))
        if beginning != _ZIP:
            raise foreign
        if not zipfile.is_zipfile(path):
            raise UserError(
                f"the checkpoint {path} is truncated or damaged; use another one, such as the "
                "run's last.ckpt."
            )
        if not _is_plain_archive(path):
            raise foreign
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {path}: {error.strerror or error}.") from error
    except (
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        MemoryError,
        NotImplementedError,
        zipfile.BadZipFile,
        pickle.UnpicklingError,
    ) as error:
        raise foreign from error
    if not isinstance(content, dict):
        raise foreign
    return content


def not_ours(path: Path) -> UserError:
    """The refusal of a file that is something else."""
    return UserError(
        f"{path} is not a checkpoint of imagegen; give a .ckpt file that {typed('train')} wrote."
    )


def is_modest(content: object, most: int) -> bool:
    """Whether plain containers have at most `most` entries.

    One that holds another several times counts it each time, because whoever walks through it meets
    it as often; one that holds itself has no end.
    """
    waiting, seen = [content], 0
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, Mapping):
            entry = [*entry.keys(), *entry.values()]
        if isinstance(entry, list | tuple | set):
            seen += len(entry)
            if seen > most:
                return False
            waiting.extend(entry)
    return True


def _is_plain_archive(path: Path) -> bool:
    """Whether a zip archive is as `torch.save` writes it: uncompressed, naming no code."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            return False
        if sum(entry.file_size for entry in entries) > size:
            return False
        pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE:
            return False
        for operation, argument, _ in pickletools.genops(archive.read(pickles[0])):
            if operation.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
                return False
            if operation.name == "GLOBAL" and not _NAMES.fullmatch(str(argument)):
                return False
    return True
