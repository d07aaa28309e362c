"""The compiled loop beside onnxruntime and torch.compile, on the same model and random numbers.

    python benchmarks/decoders.py --out FOLDER [--data mnist] [--batch 1 16 64] [--repeats 5]

needs `pip install -e '.[onnx]'` and, for torch.compile, a C++ compiler; a way that fails is left
out, with the reason. Each way draws the first steps of the same images from the default model,
untrained, in turn in one process:

- compiled loop: what `sample.py` takes (precision=auto), and the same in float32;
- PyTorch: the model's step, operation by operation;
- onnxruntime: the exported step, with the loop and the draws of `examples/generate_onnx.py`;
- torch.compile: the exported step's function, `mode="reduce-overhead"`, the draws in PyTorch.

Images of fewer than 256 steps, such as digits, have no compiled loop. FOLDER gets `decoders.json`
(every repeat) and `decoders.md`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from imagegen.checkpoint.onnx import export_onnx  # noqa: E402
from imagegen.checkpoint.onnx_step import SingleStep  # noqa: E402
from imagegen.checkpoint.provenance import commit, versions  # noqa: E402
from imagegen.cli.entry import compose  # noqa: E402
from imagegen.commands.benchmark.common import load_average, spread  # noqa: E402
from imagegen.commands.benchmark.setting import Setting  # noqa: E402
from imagegen.commands.benchmark.tables import ranged, rows  # noqa: E402
from imagegen.core.machine import describe  # noqa: E402
from imagegen.core.values import plain  # noqa: E402
from imagegen.generation.decode import choose_decoder  # noqa: E402
from imagegen.generation.random_numbers import noise  # noqa: E402
from imagegen.generation.sampling_request import no_gradients  # noqa: E402
from imagegen.heads.controls import Controls  # noqa: E402
from imagegen.model.transformer import ImageTransformer  # noqa: E402

REST = 0.1
"""Seconds after which the threads of the way before no longer spin."""
Way = Callable[[np.ndarray], np.ndarray]
"""Draws levels "b n s" from uniform numbers "b n u"."""


def compiled(model: ImageTransformer, precision: str) -> Way:
    decoder = choose_decoder(model, Controls(), precision)
    if decoder is None:
        raise ValueError("the model has no compiled loop here")

    def draw(numbers: np.ndarray) -> np.ndarray:
        count, steps, _ = numbers.shape
        parameters, state = model.step(None, model.initial_state(count))
        sequence = np.zeros((count, steps, model.raster.values_per_step), dtype=np.uint8)
        decoder.draw(state, parameters, sequence, numbers, Controls())
        return sequence

    return draw


def pytorch(model: ImageTransformer) -> Way:
    def draw(numbers: np.ndarray) -> np.ndarray:
        count, steps, _ = numbers.shape
        uniform, levels = torch.from_numpy(numbers), []
        parameters, state = model.step(None, model.initial_state(count))
        for step in range(steps):
            levels.append(model.head.sample(parameters, uniform[:, step], Controls()).byte())
            if step + 1 < steps:
                parameters, state = model.step(levels[-1], state)
        return torch.stack(levels, dim=1).numpy()

    return draw


def torch_compiled(model: ImageTransformer) -> Way:
    single = SingleStep(model)
    # Otherwise the code for a second batch size would be for any size.
    step = torch.compile(single, mode="reduce-overhead", dynamic=False)

    def draw(numbers: np.ndarray) -> np.ndarray:
        count, steps, _ = numbers.shape
        uniform, levels = torch.from_numpy(numbers), []
        token, _, *others = single.inputs(count).values()
        for position in range(steps):
            parameters, *others = step(token, torch.tensor(position), others)
            token = model.head.sample(parameters, uniform[:, position], Controls()).long()
            levels.append(token.byte())
        return torch.stack(levels, dim=1).numpy()

    return draw


def onnx(model: ImageTransformer) -> Way:
    import onnxruntime

    found = importlib.util.spec_from_file_location(
        "generate_onnx", ROOT / "examples/generate_onnx.py"
    )
    example: Any = importlib.util.module_from_spec(found)  # type: ignore[arg-type]
    found.loader.exec_module(example)  # type: ignore[union-attr]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export_onnx(model, path)
        session = onnxruntime.InferenceSession(
            path.read_bytes(), options, providers=["CPUExecutionProvider"]
        )
    facts = session.get_modelmeta().custom_metadata_map
    first = json.loads(facts["initial_state"])
    names = [entry.name for entry in session.get_outputs()]

    def draw(numbers: np.ndarray) -> np.ndarray:
        count, steps, _ = numbers.shape
        state = {
            entry.name: np.full(
                (count, *entry.shape[1:]), first[entry.name], example.TYPES[entry.type]
            )
            for entry in session.get_inputs()
            if entry.name in first
        }
        token, levels = np.zeros((count, model.raster.values_per_step), np.int64), []
        for position in range(steps):
            feed = {"token": token, "position": np.array(position), **state}
            given = dict(zip(names, session.run(names, feed), strict=True))
            state = {name: given[f"next.{name}"] for name in state}
            token = example.draw(facts, given["parameters"], numbers[:, position])
            levels.append(token.astype(np.uint8))
        return np.stack(levels, axis=1)

    return draw


WAYS: dict[str, Callable[[ImageTransformer], Way]] = {
    "compiled loop": lambda model: compiled(model, "auto"),
    "compiled loop, float32": lambda model: compiled(model, "32"),
    "PyTorch": pytorch,
    "onnxruntime": onnx,
    "torch.compile": torch_compiled,
}


def model_of(data: str) -> ImageTransformer:
    """The default model for the images of a data set, untrained."""
    config = plain(compose("benchmark_generate", [f"dataset={data}", "model=default"]))
    return Setting.from_config(config, 0).build("linear")


def _made(make: Callable[[ImageTransformer], Way], model: ImageTransformer) -> Any:
    """The way, or why it cannot be had, and the seconds it took."""
    started = time.perf_counter()
    way: Way | Exception
    try:
        way = make(model)
    except Exception as error:
        way = error
    return way, time.perf_counter() - started


def measured(
    model: ImageTransformer, batches: Sequence[int], steps: int | None, repeats: int
) -> list[dict[str, Any]]:
    """A row for each batch size and way: seconds of every repeat, or why there are none."""
    length = min(steps or model.raster.length, model.raster.length)
    found, made = [], {name: _made(make, model) for name, make in WAYS.items()}
    for batch in batches:
        numbers = noise(model, 0, [(image, 0) for image in range(batch)], 0, batch)[:, :length]
        entries: dict[str, dict[str, Any]] = {}
        ways, drawn = {}, {}
        for name, (way, preparing) in made.items():
            entries[name] = {"batch_size": batch, "way": name, "steps": length, "seconds": []}
            started = time.perf_counter()
            try:
                if isinstance(way, Exception):
                    raise way
                drawn[name] = way(numbers)
                ways[name] = way
            except Exception as error:  # the others are to be measured as well
                reason = (str(error).strip().splitlines() or [""])[0]
                entries[name]["not_measured"] = f"{type(error).__name__}: {reason}"
            # To export, to compile or to load what was compiled, and to draw once.
            entries[name]["first_seconds"] = preparing + time.perf_counter() - started
        for _ in range(repeats):
            for name, way in ways.items():
                time.sleep(REST)
                started = time.perf_counter()
                way(numbers)
                entries[name]["seconds"].append(time.perf_counter() - started)
        base = drawn.get("PyTorch")
        for name, levels in drawn.items():
            if base is not None:  # rounding may change a value, and all that follow
                same = (levels == base).reshape(batch, -1).all(axis=1)
                entries[name]["images_as_pytorch"] = int(same.sum())
        found += entries.values()
    return found


def markdown(result: dict[str, Any]) -> str:
    """Milliseconds a step, and ratios turn by turn against the compiled loop."""
    machine = result["machine"]
    lines = [
        f"{machine['processor']}, {result['threads']} threads; PyTorch {result['torch_version']}, "
        f"onnxruntime {result['onnxruntime_version']}; commit {result['commit']}; load average "
        f"before: {result['load_average']}.",
        "",
        "Milliseconds a step of all images of a batch: median (least – most). Times: the median of "
        "the ratios to the compiled loop, turn by turn.",
    ]
    for data, found in result["models"].items():
        batches = sorted({row["batch_size"] for row in found})
        table = [["way", *(f"{batch} at a time" for batch in batches), "first use, s"]]
        for name in WAYS:
            cells, first = [], "–"
            for batch in batches:
                by_way = {row["way"]: row for row in found if row["batch_size"] == batch}
                row, loop = by_way[name], by_way["compiled loop"]
                if not row["seconds"]:
                    cells.append("–")
                    continue
                text = ranged(spread([1e3 * each / row["steps"] for each in row["seconds"]]))
                if row is not loop and loop["seconds"]:
                    pairs = zip(row["seconds"], loop["seconds"], strict=True)
                    text += f", ×{statistics.median(a / b for a, b in pairs):.2f}"
                cells.append(text)
                first = f"{row['first_seconds']:.1f}" if first == "–" else first
            table.append([name, *cells, first])
        lines += ["", f"{data}, the default model:", "", *rows(table)]
        missing = {(row["way"], row["not_measured"]) for row in found if "not_measured" in row}
        lines += [f"\nNot measured: {way} ({why})." for way, why in sorted(missing)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", nargs="+", default=["mnist"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, help="of an image; by default all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="by default PyTorch's")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        from importlib.metadata import version

        onnxruntime_version = version("onnxruntime")
    except ImportError:
        onnxruntime_version = "not installed"
    result: dict[str, Any] = {
        "machine": describe(torch.device("cpu")),
        "load_average": load_average(),
        "threads": torch.get_num_threads(),
        "onnxruntime_version": onnxruntime_version,
        **versions(),
        "commit": commit(),
        "models": {},
    }
    for data in options.data:
        model = model_of(data)
        with no_gradients(model):
            rows_found = measured(model, options.batch, options.steps, options.repeats)
        result["models"][data] = rows_found
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "decoders.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "decoders.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
