"""Refuse descriptions of models that a file's weights do not bear out, before memory is taken.

A description may say anything; weights cost the one who writes the file. The model is therefore
built without memory first, on PyTorch's `meta` device, and has to have the very tensors of the
file. What a model needs beside its weights, tables and states, is counted there as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imagegen.core.errors import UserError, first_line
from imagegen.core.spec import ImageSpec
from imagegen.model.transformer import ImageTransformer

MAX_HEAD_DIM = 1 << 14
"""Wider heads make some feature maps slow to build, even without memory."""

MAX_UNSTORED = 1 << 30
"""Bytes that a model's tables, or the state of one image, may take beside its weights."""

_SIZES = ("n_layers", "d_model", "n_heads", "d_ff")


def check_fit(
    spec: ImageSpec,
    options: Mapping[str, Any],
    weights: Mapping[str, Any],
    path: Path,
) -> None:
    """Check that a model can be built in proportion to its weights.

    Args:
        spec, options: what `ImageTransformer` is to be built of.
        weights: what the file at `path` holds, by the model's names; values may be anything.
        path: named in refusals.

    Raises:
        UserError: if the weights are not those of the model, or if it would need absurdly more
            memory than they do.
    """
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    stored = sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors.values())
    # A tensor may repeat what the file holds once.
    if len(tensors) != len(weights) or stored > path.stat().st_size:
        raise misfit(path, "they claim to be larger than the file")
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    sizes = {name: options[name] for name in _SIZES}
    head_dim = options.get("head_dim")
    if head_dim is not None:
        sizes["head_dim"] = head_dim
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise misfit(path, f"{name} is {size!r}")
    if head_dim is None and sizes["n_heads"] > 0:
        sizes["head_dim"] = sizes["d_model"] // sizes["n_heads"]
    numbers = sum(math.prod(shape) for shape in found.values())
    limits = {"n_layers": len(found), "head_dim": min(numbers, MAX_HEAD_DIM)}
    for name, size in sizes.items():
        if size > limits.get(name, numbers):
            raise misfit(path, f"{name} is {size}")

    # A layer alone first, so that nobody builds many layers that do not fit.
    _compare(_without_memory(spec, {**options, "n_layers": 1}, path), found, path, whole=False)
    model = _without_memory(spec, options, path)
    _compare(model, found, path, whole=True)
    named = set(model.state_dict())
    tables = sum(buffer.nbytes for name, buffer in model.named_buffers() if name not in named)
    for what, nbytes in (("tables", tables), ("the state of an image", _state_bytes(model, path))):
        if nbytes > MAX_UNSTORED:
            raise UserError(
                f"{path} describes a model that takes {nbytes / 2**30:,.1f} GiB for {what}, beside "
                f"weights of {stored / 2**30:.3f} GiB; it was changed or is meant for other images."
            )


def misfit(path: Path, what: str) -> UserError:
    """The refusal of weights that are not those of the model."""
    return UserError(
        f"the weights in {path} do not fit the model that it describes ({what}); it was changed "
        "or written by another version."
    )


def _without_memory(spec: ImageSpec, options: Mapping[str, Any], path: Path) -> ImageTransformer:
    try:
        with torch.device("meta"):
            return ImageTransformer.from_options(spec, **options)
    except UserError:
        raise
    except Exception as error:
        # A description from elsewhere can be wrong in any way.
        raise misfit(path, f"{type(error).__name__}: {first_line(error).rstrip('.')}") from error


def _state_bytes(model: ImageTransformer, path: Path) -> int:
    try:
        return model.initial_state(1).nbytes
    except RuntimeError as error:  # Beyond what even a tensor without memory can be.
        raise misfit(path, first_line(error).rstrip(".")) from error


def _compare(
    model: ImageTransformer, found: Mapping[str, tuple[int, ...]], path: Path, whole: bool
) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in wanted.items():
        if name not in found:
            raise misfit(path, f"{name} is missing")
        if found[name] != shape:
            raise misfit(path, f"{name} has shape {list(found[name])}, not {list(shape)}")
    for name in found:
        if whole and name not in wanted:
            raise misfit(path, f"{name} is unknown to it")
