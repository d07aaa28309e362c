"""What was found on this machine and decided about it: `imagegen machine`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

from imagegen.core.installation import typed
from imagegen.core.machine import AUTO, bf16_drawing, describe, threads, training_precision

if TYPE_CHECKING:
    import torch
else:  # Annotations are checked in tests; torch is not to be imported for them.
    torch = Any

_PACKAGES = "torch torchvision pytorch-lightning hydra-core numba llvmlite numpy wandb".split()


def _report() -> Iterator[tuple[str, str]]:
    import torch

    import imagegen
    from imagegen.attention import linear_scan
    from imagegen.core.values import resolve_device
    from imagegen.generation.sampling_loop import DEFAULT_BATCH

    found = describe(torch.device("cpu"))
    yield "processor", found["processor"]
    yield "instruction sets", " ".join(found["instruction_sets"]) or "unknown"
    yield "CPUs", f"{found['usable_cpus']} of {found['cores']} can be used"
    yield "threads", str(threads())
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield "GPUs", ", ".join(gpus) or ("MPS" if torch.backends.mps.is_available() else "none")
    _, training = training_precision({"precision": AUTO, "accelerator": AUTO, "devices": 1})
    yield "training", str(training)
    yield "linear attention", str(linear_scan.machine_choice())
    yield "TF32", "off; trainer.precision=tf32 turns it on"
    device = resolve_device(AUTO)
    yield "drawing", f"on {device}; {_drawing(device)}"
    yield "bf16 drawing", str(bf16_drawing(DEFAULT_BATCH))
    yield "system", found["system"]
    yield "Python", found["python_version"]
    yield "imagegen", imagegen.__version__
    for name in _PACKAGES:
        yield name, _version(name)
    for name, value in found["settings"].items():
        yield name, value


def _drawing(device: torch.device) -> str:
    from imagegen.generation import decode

    return str(decode.machine_choice(device))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Command-line entry: print what was found and decided."""
    usage = f"{typed('machine')} takes no options; it prints what was found and decided."
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(usage)
        return
    if sys.argv[1:]:
        sys.exit(f"error: {usage}")
    for name, value in _report():
        print(f"{name:17} {value}")
