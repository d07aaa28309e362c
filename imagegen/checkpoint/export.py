"""Write a checkpoint for other programs: `imagegen export ckpt=… format=… out=…`.

`format=safetensors` writes weights and their description, which `sample.py ckpt=` and the other
commands take like the checkpoint itself. `format=onnx` writes one step of the model for onnxruntime
and its like; see `imagegen.checkpoint.onnx`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from imagegen.core import values as opt
from imagegen.core.errors import UserError

FORMATS = ("safetensors", "onnx")
DTYPES = ("float32", "float16")


def run(config: Mapping[str, Any]) -> Path:
    """Do what `conf/export.yaml` and the command line ask; print what was written.

    Returns:
        the folder (safetensors) or the file (onnx).

    Raises:
        UserError: for anything that cannot be; then nothing is written.
    """
    config = opt.plain(config)
    ckpt = opt.checkpoint_path(config["ckpt"])
    kind = opt.choice(config["format"], "format", FORMATS)
    if config["out"] is None or not str(config["out"]).strip():
        what = "folder" if kind == "safetensors" else "file.onnx"
        raise UserError(f"out is missing; add out=<{what}>.")
    out = opt.absolute(str(config["out"]))
    dtype = opt.choice(config["dtype"], "dtype", DTYPES)
    folders = opt.flag(config["folders"], "folders")
    if kind == "safetensors":
        return export_safetensors(ckpt, out, dtype, folders)
    if dtype != "float32" or not folders:
        raise UserError(
            "dtype=float16 and folders=false are for format=safetensors; leave them out."
        )
    return _export_onnx(ckpt, out)


def export_safetensors(
    ckpt: str | Path, out: Path, dtype: str = "float32", folders: bool = True
) -> Path:
    """Write the weights of a checkpoint to `model.safetensors` and the rest to `config.json`.

    What only training needs, such as the optimizer's state, is left out.

    Args:
        ckpt: checkpoint file or run folder.
        out: a new or empty folder, or one with an earlier export, which is replaced.
        dtype: of the file; float16 halves its size. A model read from it computes in float32.
        folders: whether the description keeps the names of folders of this machine, such as that
            of the data.

    Raises:
        UserError: if the checkpoint cannot be read, a weight is beyond float16, or the folder
            cannot be written.
    """
    import torch

    from imagegen.checkpoint.reading import REQUIRED, load_checkpoint
    from imagegen.checkpoint.weights_folder import write_weights_folder

    if out.suffix == ".safetensors":
        raise UserError(
            f"out={out} names a file, but format=safetensors writes a folder, with the weights and "
            f"their description; name one, such as out={out.with_suffix('')}."
        )
    loaded = load_checkpoint(ckpt)
    kept = (*REQUIRED, "class_names", "machine")
    metadata = {key: loaded.metadata[key] for key in kept if key in loaded.metadata}
    if not folders:
        metadata = _without_folders(metadata)
    weights = loaded.model.state_dict()
    if dtype == "float16":
        weights = {name: tensor.to(torch.float16) for name, tensor in weights.items()}
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise UserError("a weight of this model is beyond float16; leave dtype=float16 out.")
    write_weights_folder(out, metadata, weights)
    count = sum(tensor.numel() for tensor in weights.values())
    print(f"{count:,} weights of {loaded.path}: {out}")
    return out


def _without_folders(value: Any) -> Any:
    """Plain containers, with None for absolute paths and without overrides that name one."""
    if isinstance(value, dict):
        return {key: _without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        kept = [each for each in value if not (isinstance(each, str) and any(_paths_of(each)))]
        return [_without_folders(each) for each in kept]
    return None if isinstance(value, str) and any(_paths_of(value)) else value


def _paths_of(text: str) -> Iterator[str]:
    return (part for part in (text, text.partition("=")[2]) if Path(part).is_absolute())


def _export_onnx(ckpt: str, out: Path) -> Path:
    from imagegen.checkpoint.onnx import export_onnx
    from imagegen.checkpoint.reading import load_checkpoint
    from imagegen.core.files import ensure_writable

    if out.suffix != ".onnx":
        raise UserError(f"out={out} must be a file that ends in .onnx.")
    ensure_writable(out)
    loaded = load_checkpoint(ckpt)
    error = export_onnx(loaded.model, out)
    print(
        f"one step of {loaded.path}: {out}\n"
        f"onnxruntime gives the same parameters to within {error:.1e}"
    )
    return out
