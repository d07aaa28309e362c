"""Runs every constant-state mechanism for many steps and tables how far it is from float64.

    python benchmarks/stability.py                          (65,536 steps; about half an hour)
    python benchmarks/stability.py --steps 2048 --only gla local --out FILE

Each mechanism, small and with its own options from conf/attention/, runs step by step in place and
in its parallel form, in float32 and under bfloat16 autocast, and is compared with the parallel form
of the same weights in float64. Rows are written as they come; a call that was interrupted continues
where it was.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import yaml  # noqa: E402

from imagegen.attention.base import CausalAttention  # noqa: E402
from imagegen.attention.feature_maps import FEATURE_MAPS  # noqa: E402
from imagegen.core.build import build  # noqa: E402

STEPS = 65_536
LAST = 1_000
PRECISIONS = ("float32", "bfloat16")
# Choices that are mechanisms of their own.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "linear": [{"feature_map": name} for name in FEATURE_MAPS],
    "gated_delta": [{"gate": "head"}, {"gate": "channel"}],
}


@dataclass(frozen=True)
class Tolerance:
    """How far outputs may be from float64, in units of the outputs' root mean square.

    `rms` holds for the last positions by themselves as well, so that nothing may drift.
    """

    rms: float
    largest: float


TOLERANCES = {
    "float32": Tolerance(rms=3e-5, largest=3e-4),
    # A norm of almost nothing, or relu features that round to zero, are off by as much as they are.
    "bfloat16": Tolerance(rms=0.05, largest=2.0),
}


@dataclass(frozen=True)
class Errors:
    """Absolute differences from float64."""

    rms: float
    rms_of_last: float
    largest: float

    @classmethod
    def of(cls, y: torch.Tensor, expected: torch.Tensor, last: int) -> Errors:
        errors = (y.double() - expected).abs()
        return cls(_rms(errors), _rms(errors[:, -last:]), errors.max().item())


@dataclass(frozen=True)
class Result:
    """What a run has given."""

    steps: Errors
    parallel: Errors
    output_rms: float
    output_largest: float
    finite: bool

    def meets(self, tolerance: Tolerance) -> bool:
        """Whether everything is finite and within the tolerance."""
        scale = self.output_rms
        return self.finite and all(
            errors.rms <= scale * tolerance.rms
            and errors.rms_of_last <= scale * tolerance.rms
            and errors.largest <= scale * tolerance.largest
            for errors in (self.steps, self.parallel)
        )


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and options of the mechanisms whose state keeps its size."""
    for path in sorted((ROOT / "conf" / "attention").glob("*.yaml")):
        if path.stem == "hybrid":  # its parts are here by themselves
            continue
        for variant in VARIANTS.get(path.stem, [{}]):
            options = {**yaml.safe_load(path.read_text()), **variant}
            if _keeps_its_size(_module(options)):
                yield " ".join([path.stem, *map(str, variant.values())]), options


@torch.inference_mode()
def measure(options: dict[str, Any], steps: int, precision: str, last: int = LAST) -> Result:
    """Run `steps` random positions; errors in the last ones are those of the final `last`."""
    module, exact = _module(options), _module(options)
    exact.load_state_dict(module.state_dict())
    x = torch.randn(1, steps, module.d_model, generator=torch.Generator().manual_seed(1))
    expected, _ = exact.double()(x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        parallel, after = module(x)
        state, outputs = module.initial_state(1), []
        for position in range(steps):
            y, state = module.step(x[:, position], state)
            outputs.append(y)
    stepped = torch.stack(outputs, dim=1)
    tensors = [stepped, parallel, *state.tensors(), *after.tensors()]
    return Result(
        Errors.of(stepped, expected, last),
        Errors.of(parallel, expected, last),
        _rms(expected),
        expected.abs().max().item(),
        all(bool(tensor.isfinite().all()) for tensor in tensors),
    )


def _module(options: dict[str, Any]) -> CausalAttention[Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(options, CausalAttention, d_model=8, n_heads=2)


@torch.no_grad()
def _keeps_its_size(module: CausalAttention[Any]) -> bool:
    x = torch.zeros(1, 300, module.d_model)
    before = [tensor.shape for tensor in module.initial_state(1).tensors()]
    return [tensor.shape for tensor in module(x)[1].tensors()] == before


def _rms(errors: torch.Tensor) -> float:
    return errors.square().mean().sqrt().item()


def _head(steps: int) -> str:
    command = shlex.join(["python", "benchmarks/stability.py", "--steps", str(steps)])
    limits = "\n".join(
        f"| {precision} | {t.rms:g} | {t.largest:g} |" for precision, t in TOLERANCES.items()
    )
    return f"""# Long runs

`{command}`: Python {platform.python_version()}, torch {torch.__version__}, one thread,
{_processor()}.

{steps:,} random positions through each mechanism whose state has a constant size: `d_model` 8, two
heads, all else as in `conf/attention/`. Errors are absolute differences from the parallel form of
the same weights in float64; `bfloat16` is autocast, whose states stay in float32.

The states of `softmax`, `lsh` and `strided` (whose columns hold every earlier row) grow with the
positions, so they are not among them; a hybrid does what its parts do.

Tolerances, in units of the root mean square (rms) of the outputs:

| precision | rms of the errors, and of the last {LAST:,} | largest error |
|---|---|---|
{limits}

| mechanism | precision | steps: rms | of the last {LAST:,} | largest | parallel: rms \
| of the last {LAST:,} | largest | outputs: rms | largest | finite | within | commit |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _row(name: str, precision: str, result: Result, commit: str) -> str:
    cells = [name, precision]
    for errors in (result.steps, result.parallel):
        cells += [f"{e:.1e}" for e in (errors.rms, errors.rms_of_last, errors.largest)]
    cells += [f"{result.output_rms:.2f}", f"{result.output_largest:.2f}"]
    within = result.meets(TOLERANCES[precision])
    cells += ["yes" if answer else "**no**" for answer in (result.finite, within)]
    return f"| {' | '.join([*cells, commit])} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of mechanisms' names")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/stability.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head, commit = _head(options.steps), _commit()
    if not options.out.exists() or not options.out.read_text().startswith(head):
        options.out.write_text(head)
    for name, config in cases():
        for precision in PRECISIONS:
            chosen = any(part in name for part in options.only)
            if not chosen or f"| {name} | {precision} |" in options.out.read_text():
                continue
            row = _row(name, precision, measure(config, options.steps, precision), commit)
            print(row, end="", flush=True)
            with options.out.open("a") as file:
                file.write(row)
                file.flush()
                os.fsync(file.fileno())


if __name__ == "__main__":
    main()
