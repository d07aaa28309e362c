"""What depends on the machine is decided here: arithmetic, threads, and what records say of it.

`imagegen machine` prints the decisions with the processor, its instruction sets, the
usable CPUs, GPUs and versions; a bug report should quote it.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from imagegen.core.errors import UserError
from imagegen.core.words import counted

if TYPE_CHECKING:
    import torch
else:  # Annotations are checked in tests; torch is not to be imported for them.
    torch = Any

AUTO = "auto"
TF32 = "tf32"
"""`trainer.precision=tf32`: 32-true whose matrix products a GPU rounds to TensorFloat-32."""

_PRECISIONS = "32-true bf16-mixed 16-mixed 64-true bf16-true 16-true transformer-engine".split()
_LONG_NAMES = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}

FORCE_BF16 = "IMAGEGEN_BF16"
"""Environment variable, 0 or 1: overrides the detection of bfloat16 instructions."""

FORCE_BF16_DRAWING = "IMAGEGEN_BF16_DRAWING"
"""Environment variable, 0 or 1: overrides `bf16_drawing`."""
BLOCK = 128
"""Rows of a bfloat16 product in drawing: AMX needs many to outdo the loop's own products."""

_CPUINFO = Path("/proc/cpuinfo")
_SELF_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")

# What makes bfloat16 products fast: names of torch and of Linux on x86, and on 64-bit ARM.
_BF16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX512_BF16", "bf16": "BF16", "sve_bf16": "SVE BF16"}
_NAMED = (
    "avx2 fma fma3 avx512f avx512_f avx512_vnni avx_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_int8 "
    "neon asimd asimddp dot i8mm bf16 sve sve2 sve_bf16 sme"
).split()
_SETTINGS = (
    "OMP_ GOMP_ KMP_ MKL_ ONEDNN_ DNNL_ ATEN_ MALLOC_ GLIBC_TUNABLES LD_PRELOAD PYTORCH_ NUMBA_ "
    "CUDA_VISIBLE_DEVICES NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32 IMAGEGEN_"
).split()
SPIN_COUNT = "10000"
"""Looks of a waiting thread before it sleeps; GNU OpenMP's own default is 300,000."""


@dataclass(frozen=True)
class Choice:
    """A decision and, in a few words, its reason."""

    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.value}: {self.reason}"


def instruction_sets() -> frozenset[str]:
    """Names of this CPU's instruction sets, as PyTorch or else Linux spells them."""
    import torch

    # PyTorch 2.9 cannot be asked yet.
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        return frozenset(name for name, value in capabilities().items() if value is True)
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    return frozenset(text.split())


def bf16(device: torch.device) -> Choice:
    """Whether the device has instructions for bfloat16, "yes" or "no", and why.

    Without them it computes in bfloat16 many times slower than in float32.
    """
    import torch

    forced = os.environ.get(FORCE_BF16)
    if forced in ("0", "1"):
        return Choice("yes" if forced == "1" else "no", f"{FORCE_BF16}={forced}")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        has = (major, minor) >= (8, 0)
        name = torch.cuda.get_device_name(device)
        return Choice("yes" if has else "no", f"{name} has compute capability {major}.{minor}")
    if device.type != "cpu":
        return Choice("no", f"untested on {device.type} devices")
    found = instruction_sets()
    names = [name for feature, name in _BF16.items() if feature in found]
    if names:
        return Choice("yes", f"this CPU has {names[0]}")
    return Choice("no", "this CPU has no bfloat16 instructions")


def has_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16; see `bf16`."""
    return bf16(device).value == "yes"


def bf16_drawing(batch_size: int) -> Choice:
    """Whether batches of this size are drawn with bfloat16 products, "yes" or "no", and why.

    Only AMX makes them faster than the loop's own, and only for blocks of rows, one a thread.
    """
    import torch

    forced = os.environ.get(FORCE_BF16_DRAWING)
    if forced in ("0", "1"):
        return Choice("yes" if forced == "1" else "no", f"{FORCE_BF16_DRAWING}={forced}")
    if "amx_bf16" not in instruction_sets() or not torch.backends.mkldnn.is_available():
        return Choice("no", "this CPU has no AMX")
    needed = BLOCK * int(threads().value)
    return Choice("yes" if batch_size >= needed else "no", f"AMX, from batches of {needed} on")


def training_devices(options: Mapping[str, Any]) -> list[torch.device]:
    """The devices of this machine that Lightning's Trainer takes with these options.

    Raises:
        MisconfigurationException: as the Trainer does, where there are none.
        UserError: where the Trainer fails at the options otherwise.
    """
    import logging
    import warnings

    import torch
    from pytorch_lightning import Trainer

    names = ("accelerator", "devices", "num_nodes", "strategy")
    chosen = {name: options[name] for name in names if name in options}
    with warnings.catch_warnings():
        # The real trainer repeats them.
        warnings.simplefilter("ignore")
        logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
        try:
            trainer = Trainer(
                **chosen,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
        except (TypeError, ValueError) as error:
            raise UserError(f"the trainer rejects its settings: {error}") from error
    kind = trainer.strategy.root_device.type
    if kind != "cuda":
        return [torch.device(kind)]
    return [torch.device("cuda", index) for index in trainer.device_ids]


def training_precision(
    options: Mapping[str, Any], recorded: str | None = None
) -> tuple[dict[str, Any], Choice]:
    """Options of Lightning's Trainer with the precision that they mean on this machine.

    `auto` is what the run began with or, in a new run, bf16-mixed where all devices have
    instructions for bfloat16 and 32-true elsewhere. Heads, attention states and weights stay in
    float32 under both.

    Args:
        options: section `trainer` of the configuration.
        recorded: the precision of the run that is resumed; None for a new run, and for checkpoints
            that do not say it.

    Returns:
        the options, and the precision with its reason.

    Raises:
        UserError: for an unknown precision, and for `tf32` without an NVIDIA GPU.
        MisconfigurationException: where the devices do not exist.
    """
    asked = str(options.get("precision") or "32-true")
    if asked != AUTO:
        choice = Choice(_LONG_NAMES.get(asked, asked), "as configured")
        if not choice.value.startswith((TF32, *_PRECISIONS)):
            raise UserError(
                f"trainer.precision={asked} is unknown; it can be {AUTO}, {TF32} (on a GPU), "
                f"{', '.join(_PRECISIONS)}."
            )
    elif recorded is not None:
        choice = Choice(recorded, "as this run began")
    else:
        reasons = [bf16(device) for device in training_devices(options)]
        lacking = [reason for reason in reasons if reason.value == "no"]
        choice = Choice("32-true" if lacking else "bf16-mixed", (lacking or reasons)[0].reason)
    return {**options, **_as_lightning_takes_it(choice.value, options)}, choice


def stored_dtype(precision: str) -> torch.dtype:
    """Of what layers return under a precision of `training_precision`."""
    import torch

    kinds = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    return kinds.get(precision.partition("-")[0], torch.float32)


def _as_lightning_takes_it(precision: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if precision not in (TF32, "16-mixed"):
        return {"precision": precision}
    kind = training_devices(options)[0].type
    if precision == TF32:
        if kind != "cuda":
            raise UserError(
                "trainer.precision=tf32 needs an NVIDIA GPU; choose 32-true or bf16-mixed."
            )
        return {"precision": "32-true"}
    if kind == "cpu":
        # Lightning would take bf16-mixed instead.
        from pytorch_lightning.plugins import MixedPrecision

        return {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu")]}
    return {"precision": precision}


def prepare(processes: int = 1, *, tf32: bool = False) -> Choice:
    """Set what PyTorch keeps for the whole process: threads, and how float32 is multiplied.

    Matrix products and convolutions of float32 are exact to float32 unless `tf32` allows a GPU to
    round their factors to TensorFloat-32; PyTorch's own default is TF32 for convolutions alone.

    Args:
        processes: as in `threads`.

    Returns:
        the threads.
    """
    import torch

    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    choice = threads(processes)
    _set_threads(int(choice.value))
    return choice


def usable_cpus() -> int:
    """CPUs that this process may use at once: by its affinity and by its CPU quota, at least 1."""
    quotas = [quota for quota in _quotas() if quota > 0]
    return max(1, min([_affinity(), *(int(quota) for quota in quotas)]))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas() -> Iterator[float]:
    """CPUs that the control groups of this process allow, its own group and those above it.

    Version 2 keeps "quota period" or "max period" in cpu.max, version 1 two files.
    """
    try:
        lines = _SELF_CGROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container, the path may be that of the host, whose groups are out of sight.
        for path in (PurePosixPath(group), *PurePosixPath(group).parents):
            inside = str(path).lstrip("/")
            if controllers:
                folder = _CGROUPS / "cpu" / inside
                quota = _first_number(folder / "cpu.cfs_quota_us")
                period = _first_number(folder / "cpu.cfs_period_us")
            else:
                quota, period = _numbers(_CGROUPS / inside / "cpu.max", 2)
            if quota is not None and period:
                yield quota / period


def _numbers(path: Path, count: int) -> list[float | None]:
    """The first numbers in a file, None for each that is not there or is a word."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except OSError:
        words = []
    found = [float(word) if word.lstrip("-").isdigit() else None for word in words[:count]]
    return found + [None] * (count - len(found))


def _first_number(path: Path) -> float | None:
    return _numbers(path, 1)[0]


def threads(processes: int = 1) -> Choice:
    """How many threads PyTorch and the compiled loop share work between, and why.

    That is what PyTorch announces (OMP_NUM_THREADS or the CPUs it sees), but no more than there are
    usable CPUs: teams of more threads wait for each other, and take up to a hundred times as long.

    Args:
        processes: that share this machine's CPUs for one run.
    """
    import torch

    announced, usable = _announced(), usable_cpus()
    value = str(min(torch.get_num_threads(), max(1, usable // processes)))
    source = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "PyTorch"
    if processes > 1:
        return Choice(value, f"{processes} processes share {counted(usable, 'CPU')}")
    if announced > usable:
        return Choice(value, f"{source} says {announced}, but {counted(usable, 'CPU')} can be used")
    if announced < usable:
        return Choice(value, f"set by {source}; {counted(usable, 'CPU')} can be used")
    return Choice(value, f"{counted(usable, 'CPU')} can be used")


@functools.cache
def _announced() -> int:
    """PyTorch's threads before anything was set here."""
    import torch

    return torch.get_num_threads()


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let idle threads of PyTorch sleep early; of use only before PyTorch is imported.

    GNU OpenMP lets a thread that waits for others spin for milliseconds. Where anything else wants
    the CPU, the thread that is waited for cannot run meanwhile, and training takes ten times as
    long or more; where nothing else does, sleeping too early costs speed as well. The count is a
    compromise that was measured (benchmarks/results/machines.md).
    Whoever has set a policy keeps it.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(environment):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT


def _set_threads(count: int) -> None:
    import torch

    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


@contextmanager
def limited_threads(most: int | None = None) -> Iterator[None]:
    """PyTorch has no more threads than usable CPUs, or than `most`, while the block runs."""
    import torch

    before = torch.get_num_threads()
    _set_threads(most or int(threads().value))
    try:
        yield
    finally:
        _set_threads(before)


def describe(device: torch.device) -> dict[str, Any]:
    """What records keep about the machine: plain numbers, strings and containers.

    Args:
        device: that computes; a CUDA device is named.
    """
    import torch

    return {
        "processor": processor(),
        "instruction_sets": sorted(instruction_sets() & set(_NAMED)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "usable_cpus": usable_cpus(),
        "threads": torch.get_num_threads(),
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "memory_bytes": _memory(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": platform.platform(),
        "python_version": platform.python_version(),
        "settings": settings(os.environ),
    }


def rounding(device: torch.device) -> str:
    """What decides how PyTorch rounds on this device, in words: kind, instructions, version."""
    import torch

    kind = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    )
    return f"{device.type} ({kind}), PyTorch {torch.__version__}"


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change how fast or how exactly is computed."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(tuple(_SETTINGS))
    }


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
