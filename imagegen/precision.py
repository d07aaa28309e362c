"""In which arithmetic a device trains fastest without harm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:  # Annotations are checked in tests; torch is not to be imported for them.
    torch = Any

AUTO = "auto"


def has_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16; it computes with them painfully else."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # Names of Linux: x86's AVX-512 and AMX, and those of 64-bit ARM.
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(text.split()))


def trainer_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of Lightning's Trainer in which precision=auto is replaced by what it stands for.

    That is bf16-mixed where the device that the Trainer is going to take has instructions for
    bfloat16, and 32-true elsewhere. Heads, attention states and weights stay in float32 under both.
    """
    import torch

    if options.get("precision") != AUTO:
        return dict(options)
    accelerator = options.get("accelerator")
    gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    other = accelerator == "mps" or (accelerator == "auto" and torch.backends.mps.is_available())
    kind = "cuda" if gpu else "mps" if other else "cpu"
    bf16 = has_bf16(torch.device(kind))
    return {**options, "precision": "bf16-mixed" if bf16 else "32-true"}
