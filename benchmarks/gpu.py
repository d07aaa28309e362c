"""Run every check and every measurement that needs a CUDA GPU, in at most twelve minutes.

    make gpu                               # or: python benchmarks/gpu.py
    make gpu OUT=FOLDER                    # a new folder; outputs/gpu/<date>-<time> by default
    make gpu DEVICE=cpu                    # the same list with tiny models, without a GPU

The folder gets `gpu.md`, a table that is written anew after each check, and a log of each check
beside what it made. A check that fails or takes too long does not stop the next. The exit status is
1 where any failed or was not run. No data are needed: models are trained on scikit-learn's digits
and on pictures that are drawn here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

SECONDS = 720
PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"


@dataclass(frozen=True)
class Check:
    """Something to run.

    Attributes:
        name: of the row and the log.
        limit: seconds after which it is ended; what earlier checks have left is added.
        commands: one after another; the first that fails ends the check.
        figures: what the table says about the output, such as images per second; an error that it
            raises is a failure.
        skipped: why it is not run on this machine.
        environment: variables to set.
    """

    name: str
    limit: int
    commands: Sequence[Sequence[str]]
    figures: Callable[[str], str] = lambda output: _last_line(output)
    skipped: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """What came of a check."""

    result: str
    seconds: float | None = None
    figures: str = ""


def run(checks: Sequence[Check], out: Path, title: str, seconds: float = SECONDS) -> bool:
    """Run checks in their order and write the table; returns whether none failed.

    Args:
        checks: their limits add up to at most `seconds`.
        out: an existing folder.
        title: of the table.
        seconds: for all of them together.
    """
    rows: dict[str, Row] = {}
    end = time.monotonic() + seconds
    later = sum(check.limit for check in checks)
    _write(out, title, checks, rows)
    for check in checks:
        later -= check.limit
        left = end - time.monotonic()
        print(f"== {check.name}", flush=True)
        if check.skipped is not None:
            row = Row(SKIPPED, figures=check.skipped)
        elif left < 1:
            row = Row(NOT_RUN, figures="no time was left")
        else:
            row = _run(check, out, min(left, max(check.limit, left - later)))
        print(f"   {row.result} {row.figures}", flush=True)
        rows[check.name] = row
        _write(out, title, checks, rows)
    return all(row.result in (PASSED, SKIPPED) for row in rows.values())


def _run(check: Check, out: Path, limit: float) -> Row:
    started = time.monotonic()
    log = out / f"{check.name}.log"
    result, figures = FAILED, ""
    try:
        for command in check.commands:
            with log.open("a", encoding="utf-8") as file:
                print("$", shlex.join(command), file=file, flush=True)
                left = limit - (time.monotonic() - started)
                status = _status(command, file, left, check.environment)
            if status != 0:
                why = f"ended after {limit:.0f} s" if status is None else f"status {status}"
                figures = f"{why}; {_last_line(_text(log))}"
                break
        else:
            figures, result = check.figures(_text(log)), PASSED
    except Exception as error:  # a program that is not there, or an output without its figures
        figures = f"{type(error).__name__}: {error}"
    return Row(result, time.monotonic() - started, figures)


def _status(
    command: Sequence[str], log: Any, limit: float, environment: Mapping[str, str]
) -> int | None:
    """The exit status of a command; None where it took too long."""
    # A session of its own, so that the processes that it starts end with it.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=max(0.1, limit))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _write(out: Path, title: str, checks: Sequence[Check], rows: Mapping[str, Row]) -> None:
    lines = [f"# {title}", "", "| check | result | seconds | figures |", "|---|---|---:|---|"]
    for check in checks:
        row = rows.get(check.name, Row(NOT_RUN))
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        figures = row.figures.replace("|", "\\|")
        lines.append(f"| {check.name} | {row.result} | {seconds} | {figures} |")
    (out / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


PICTURES = "pictures"


@dataclass(frozen=True)
class Commands:
    """The commands of the list, for a GPU or, with tiny models, for a CPU.

    Attributes:
        device: `cuda` or `cpu`.
        out: where they write, absolute.
    """

    device: str
    out: Path

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def tiny(self) -> list[str]:
        """Sizes of models on a CPU."""
        sizes = {} if self.gpu else {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 16}
        return [f"model.{name}={size}" for name, size in sizes.items()]

    def python(self, *arguments: str) -> list[str]:
        return [sys.executable, *arguments]

    def imagegen(self, words: str, *options: str) -> list[str]:
        return self.python("-m", "imagegen", *words.split(), f"device={self.device}", *options)

    def training(self, name: str, *options: str) -> list[str]:
        return self.python(
            "train.py",
            f"trainer={'gpu' if self.gpu else 'cpu'}",
            *("logger=none", "trainer.max_epochs=1", "callbacks.grids.n_samples=4"),
            *("trainer.limit_train_batches=40", "trainer.limit_val_batches=2"),
            f"hydra.run.dir={self.out / name}",
            *self.tiny,
            *options,
        )

    def training_on_pictures(self, name: str, *options: str) -> list[str]:
        """Long enough images that steps are recorded, in the pictures of the validation too."""
        pictures = ["dataset=image_folder", f"dataset.root={self.out / PICTURES}"]
        pictures += ["dataset.size=16", "dataset.channels=1", f"dataset.cache={self.out / 'cache'}"]
        return self.training(name, *pictures, "batch_size=8", *options)

    def ckpt(self, trained: str = "train-pictures") -> str:
        """The run that is drawn from and scored."""
        return f"ckpt={self.out / trained}"

    def sampling(
        self, name: str, *options: str, trained: str = "train-pictures", on: str | None = None
    ) -> list[str]:
        where = [f"device={on or self.device}", f"out={self.out / name}"]
        return self.python("sample.py", self.ckpt(trained), *where, *options)

    def benchmark(self, words: str, name: str, *options: str) -> list[str]:
        if self.gpu:
            size = ["model=paper", "repeats=3", "budget=6", "time_limit=12"]
        else:
            size = ["model=default", *self.tiny, "repeats=1", "budget=1", "batch_sizes=[1]"]
        return self.imagegen(f"benchmark {words}", f"out={self.out / name}", *size, *options)


NO_TF32 = "only GPUs have TF32"


def checks(device: str, out: Path, gpus: int) -> list[Check]:
    """All checks, whose limits add up to `SECONDS` at most.

    Args:
        device: `cuda`, or `cpu` for the same list with tiny models.
        out: where they write, absolute.
        gpus: number of CUDA devices.
    """
    run = Commands(device, out)
    return [*_trainings(run), *_drawings(run, gpus), *_regions(run), *_speed_checks(run)]


def _trainings(run: Commands) -> list[Check]:
    """The machine, the tests, and a training in each precision."""
    tests = ["tests/generation/decode/test_graph.py", "-k", "known_sequences or switched_off"]
    if run.gpu:
        # Not those of this list, which run it.
        tests = ["tests", "--ignore=tests/benchmarks/test_gpu.py", "-k", "cuda or gpu or graph"]
    nvidia_smi = [["nvidia-smi"]] if shutil.which("nvidia-smi") else []
    machine = [*nvidia_smi, run.python("-m", "imagegen", "machine")]
    listed = [
        Check("machine", 30, machine, _machine),
        Check("tests", 80, [run.python("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)]),
    ]
    for precision in ("bf16-mixed", "32-true", "16-mixed", "tf32"):
        name = f"train-{precision}"
        command = run.training(name, f"trainer.precision={precision}")
        skipped = NO_TF32 if precision == "tf32" and not run.gpu else None
        listed.append(Check(name, 20, [command], _trained, skipped))
    for name, options in (("train-pictures", []), ("train-any-order", ["model.order=any"])):
        listed.append(Check(name, 25, [run.training_on_pictures(name, *options)], _trained))
    return listed


def _drawings(run: Commands, gpus: int) -> list[Check]:
    """What is done with the model of pictures."""
    out, ckpt, packed = run.out, run.ckpt(), run.out / "packed.bin"
    completing = ("task=complete", "n=8", "completions=2")
    return [
        Check("sample", 20, [run.sampling("sample", "n=64")], _drawn(out / "sample", run.gpu)),
        Check(
            "complete",
            20,
            [run.sampling("complete", *completing)],
            _drawn(out / "complete", run.gpu),
        ),
        Check("evaluate", 20, [run.imagegen("evaluate", ckpt)]),
        Check("evaluate-32", 20, [run.imagegen("evaluate", ckpt, "precision=32")]),
        Check(
            "codec",
            30,
            [
                run.imagegen("compress", ckpt, "limit=2", f"out={packed}"),
                run.imagegen("decompress", ckpt, f"file={packed}", f"out={out / 'unpacked'}"),
            ],
            lambda output: _line_with("bytes", output),
        ),
        Check("verify", 30, [run.imagegen("verify", ckpt)]),
        Check(
            "second-gpu",
            25,
            [
                run.training("train-second-gpu", "trainer.devices=[1]"),
                run.sampling("sample-second-gpu", "n=64", on="cuda:1"),
            ],
            _drawn(out / "sample-second-gpu", run.gpu),
            "this machine has no second GPU" if gpus < 2 else None,
        ),
        Check("mechanisms", 45, [run.python(__file__, "--mechanisms", "--device", run.device)]),
    ]


def _regions(run: Commands) -> list[Check]:
    """Any region, by particles and by the model of any order."""
    region, listed = "visible=left:0.5", []
    models = {"particles": "train-pictures", "any-order": "train-any-order"}
    for name, trained in models.items():
        drawn = f"complete-{name}"
        command = run.sampling(
            drawn, "task=complete", "n=4", "completions=2", region, trained=trained
        )
        listed.append(Check(drawn, 20, [command], _drawn(run.out / drawn, run.gpu)))
    scored = [
        run.imagegen("evaluate", run.ckpt(trained), region, "limit=4")
        for trained in models.values()
    ]
    return [*listed, Check("evaluate-regions", 30, scored, _scored_regions)]


def _speed_checks(run: Commands) -> list[Check]:
    """Images a second, of drawing and of training."""

    def generate(name: str, batches: str, *options: str) -> Check:
        measured = run.benchmark("generate", name, "contestants=[linear,linear_step]", *options)
        measured += [f"batch_sizes={batches}"] if run.gpu else ["steps=1", "positions=[10]"]
        return Check(name, 65, [measured], lambda _: _speeds(run.out / name / "generate.json"))

    def train(name: str, limit: int, contestants: str, **variables: str) -> Check:
        measured = run.benchmark("train", name, "dataset=mnist", f"contestants={contestants}")
        measured += ["batch_sizes=[16,128]"] if run.gpu else []
        return Check(
            name,
            limit,
            [measured],
            lambda _: _speeds(run.out / name / "train.json"),
            NO_TF32 if "tf32" in name and not run.gpu else None,
            variables,
        )

    return [
        generate("generate-mnist", "[1,64,1000,10000]", "dataset=mnist"),
        generate("generate-cifar10", "[1,64,1000]", "dataset=cifar10", "model.n_layers=16"),
        train("train-speed", 45, "[linear,linear_bf16]", NVIDIA_TF32_OVERRIDE="0"),
        train("train-speed-tf32", 25, "[linear]", TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1"),
    ]


def draw_pictures(folder: Path) -> None:
    """Write 112 grey pictures of 16 x 16 pixels, a disc on a gradient each: 80 to train on."""
    import numpy as np
    from PIL import Image

    splits = ["train"] * 80 + ["val"] * 16 + ["test"] * 16
    for split in set(splits):
        (folder / split).mkdir(parents=True)
    random = np.random.default_rng(0)
    y, x = np.mgrid[:16, :16]
    for index, split in enumerate(splits):
        top, left, radius, slope = random.uniform([4, 4, 2, -8], [12, 12, 5, 8])
        picture = 128 + slope * (x - 8)
        picture[(y - top) ** 2 + (x - left) ** 2 < radius**2] = 255 * (index % 2)
        file = folder / split / f"{index:03}.png"
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(file)


def mechanisms(device: str) -> bool:
    """A training step, and 16 images of 32 pixels drawn in two ways, with every mechanism.

    A line for each mechanism and head is printed, the last one counts them. A mechanism whose steps
    can be recorded is drawn from with a recorded step too; where rounding differs, so may an image.

    Returns:
        whether all went well.
    """
    import numpy as np
    import torch
    import yaml

    from imagegen.core.spec import ImageSpec
    from imagegen.generation.decode.graph import GraphDecoder, why_not
    from imagegen.generation.sampling_loop import draw_images
    from imagegen.generation.sampling_request import SamplingRequest
    from imagegen.heads.controls import Controls
    from imagegen.model.transformer import ImageTransformer

    configs = {
        kind: {
            path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
            for path in sorted((ROOT / "conf" / kind).glob("*.yaml"))
        }
        for kind in ("attention", "head")
    }
    counts = {"trained and drawn": 0, "recorded": 0, "failed": 0}

    def one(attention: dict[str, Any], head: dict[str, Any]) -> str:
        torch.manual_seed(0)
        model = ImageTransformer.from_options(
            ImageSpec(8, 4, 1),
            attention,
            head,
            {"_target_": "imagegen.model.embeddings.Neighbourhood"},
            **{"n_layers": 3, "d_model": 32, "n_heads": 2, "d_ff": 64},
        ).to(device)
        images = torch.randint(256, (8, 8, 4, 1), dtype=torch.uint8).to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = model.bits_per_dim(images).mean()
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not torch.nn.utils.get_total_norm(gradients).isfinite():
            raise ValueError("a gradient is not a number")

        def drawn(decoder: GraphDecoder | None) -> np.ndarray:
            request = SamplingRequest(0, Controls(), None, None, decoder)
            return np.concatenate(list(draw_images(model, range(16), request)))

        steps, reason = drawn(None), why_not(model)
        if reason is not None:
            return f"{loss:.2f} bits/dim, by steps: {reason}"
        equal = (drawn(GraphDecoder(model)) == steps).reshape(16, -1).all(axis=1).sum()
        counts["recorded"] += 1
        if equal < 10:
            raise ValueError(f"only {equal} of 16 images are those of the steps")
        return f"{loss:.2f} bits/dim, recorded, {equal} of 16 images are those of the steps"

    for name, attention in configs["attention"].items():
        for head_name, head in configs["head"].items():
            try:
                said = one(attention, head)
                counts["trained and drawn"] += 1
            except Exception as error:  # the others are to be tried as well
                said = f"failed: {type(error).__name__}: {error}".splitlines()[0]
                counts["failed"] += 1
            print(f"{name}, {head_name}: {said}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return not counts["failed"]


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _last_line(output: str) -> str:
    return [line for line in output.splitlines() if line.strip()][-1].strip()[:200]


def _machine(output: str) -> str:
    found = dict(line.split(maxsplit=1) for line in output.splitlines() if " " in line)
    return "; ".join(f"{name} {found[name].strip()}" for name in ("GPUs", "torch", "training"))


def _line_with(pattern: str, output: str) -> str:
    """The first line with what the pattern describes; every run of spaces is one.

    Raises:
        ValueError: if it has none.
    """
    for line in output.splitlines():
        # Commands begin with a dollar sign.
        if re.search(pattern, line) and not line.startswith("$"):
            return " ".join(line.split())
    raise ValueError(f"no line of the log has {pattern!r}")


def _trained(output: str) -> str:
    return _line_with("^step .*bits/dim.*images/s", output)


def _scored_regions(output: str) -> str:
    found = [line for line in output.splitlines() if "bits per hidden value" in line]
    if len(found) != 2:
        raise ValueError(f"{len(found)} of 2 models were scored")
    return "; ".join(found)


def _drawn(folder: Path, gpu: bool) -> Callable[[str], str]:
    def figures(output: str) -> str:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if gpu and manifest["loop"] == "torch":
            raise ValueError(f"no step was recorded: {_line_with('without', output)}")
        return f"{_line_with(' in .* s', output)}; loop {manifest['loop']}"

    return figures


def _speeds(result: Path) -> str:
    """Images a second of each contestant at each batch size."""
    found = json.loads(result.read_text(encoding="utf-8"))["contestants"]
    parts = []
    for one in found:
        speeds = [
            f"{batch['images_per_second']['median']:,.4g} at {batch['batch_size']:,}"
            if batch["images_per_second"]
            else f"none at {batch['batch_size']:,} ({batch['not_measured']})"
            for batch in one["batches"]
        ]
        parts.append(f"{one['title']}: images/s {', '.join(speeds)}")
    return "; ".join(parts)


def main() -> int:
    """Command-line entry."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", help="a new folder; outputs/gpu/<date>-<time> by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mechanisms", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA GPU here: nothing was checked", file=sys.stderr)
        return 1
    if options.mechanisms:
        return 0 if mechanisms(options.device) else 1
    out = Path(options.out or f"outputs/gpu/{datetime.now():%Y-%m-%d-%H%M%S}").absolute()
    if out.exists():
        print(f"error: {out} exists; name a new folder.", file=sys.stderr)
        return 1
    out.mkdir(parents=True)
    draw_pictures(out / PICTURES)
    listed = checks(options.device, out, torch.cuda.device_count())
    title = f"Checks on {options.device}, {datetime.now():%Y-%m-%d %H:%M}"
    # A CPU may be slow, and nobody pays for it by the minute.
    good = run(listed, out, title, SECONDS if options.device == "cuda" else 3 * SECONDS)
    print(f"look at {out / 'gpu.md'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
