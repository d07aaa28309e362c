"""Generate images from an exported model, with numpy and onnxruntime alone.

    imagegen export ckpt=RUN format=onnx out=model.onnx
    python examples/generate_onnx.py model.onnx grid.pgm --n 16 --seed 0

`model.onnx` is one step of the model: from the value before, the position and the state it gives
the parameters of the next value's distribution, and the next state. All that is left to do here is
to draw a value from the distribution, and to hand the state on. The random numbers are those of
sample.py, so the images are too, but for values that are on the border between two levels to the
last digits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import onnxruntime

TYPES = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int64)": np.int64}


def generate(path: str | Path, n: int, seed: int = 0, label: int = -1) -> np.ndarray:
    """Draw n images with the model in the file `path`: uint8 levels, "n h w c".

    A model that knows labels draws images of the class `label`, or with -1 of any.
    """
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    height, width, channels, steps, values_per_step, numbers = (
        int(facts[name])
        for name in ("height", "width", "channels", "steps", "values_per_step", "uniforms_per_step")
    )
    noise = np.stack([uniforms(seed, image, steps * numbers) for image in range(n)])
    noise = noise.reshape(n, steps, numbers)
    labels = {"label": np.full(n, label)} if int(facts["n_classes"]) else {}

    first = json.loads(facts["initial_state"])
    state = {
        entry.name: np.full((n, *entry.shape[1:]), first[entry.name], TYPES[entry.type])
        for entry in session.get_inputs()
        if entry.name in first
    }
    names = [entry.name for entry in session.get_outputs()]
    values = np.zeros((n, steps, values_per_step), np.int64)
    token = values[:, 0]  # Ignored at position 0, because no value is before it.
    for position in range(steps):
        feed = {"token": token, "position": np.array(position), **labels, **state}
        found = dict(zip(names, session.run(names, feed), strict=True))
        state = {name: found[f"next.{name}"] for name in state}
        token = draw(facts, found["parameters"], noise[:, position])
        values[:, position] = token
    # Rows from the top, pixels from the left, the channels of a pixel together.
    return values.reshape(n, height, width, channels).astype(np.uint8)


def uniforms(seed: int, image: int, count: int) -> np.ndarray:
    """Random numbers in (0, 1) of one image, the same whatever is drawn beside it."""
    bits = np.random.Philox(key=[seed, image], counter=[0, 0, 0, 0]).random_raw(count)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def draw(facts: dict[str, str], parameters: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Draw the values of a step for each row of parameters, by inversion: levels "n s"."""
    parameters = parameters.astype(np.float64)
    if facts["head"] == "categorical":
        return invert(parameters, noise[:, 0])[:, np.newaxis]
    if facts["head"] != "mixture_of_logistics":
        raise SystemExit(f"this example does not know the head {facts['head']}.")
    # Choose a component, then for each value a point of its logistic, then the level around it.
    # The parameters are the logits of k logistics and, where the mixture has one, of a softmax, and
    # those of its levels for each of the s values; s k means, s k log-scales and k coefficients for
    # each value on each one before it.
    top, s = int(facts["levels"]) - 1, int(facts["values_per_step"])
    k, softmax = int(facts["n_mixtures"]), int(facts.get("categorical", 0))
    component = invert(parameters[:, : k + softmax], noise[:, 0])
    logits = k + softmax + softmax * s * (top + 1)
    parts = parameters[:, logits:].reshape(len(parameters), -1, k)
    chosen = parts[np.arange(len(parts)), :, np.minimum(component, k - 1)]
    means, log_scales = np.clip(chosen[:, :s], -1e4, 1e4), chosen[:, s : 2 * s]
    weights, first = np.tanh(chosen[:, 2 * s :]), 0
    levels = np.zeros((len(parts), s))
    for i in range(s):
        before = levels[:, :i] * (2 / top) - 1
        mean = means[:, i] + (weights[:, first : first + i] * before).sum(axis=1)
        u = noise[:, 1 + i]
        x = mean + np.exp(np.clip(log_scales[:, i], -7, 7)) * (np.log(u) - np.log1p(-u))
        levels[:, i] = np.clip(np.rint((x + 1) / 2 * top), 0, top)
        first += i
    for row in np.flatnonzero(component >= k):
        levels[row] = invert(parameters[row, k + 1 : logits].reshape(s, -1), noise[row, 1:])
    return levels.astype(np.int64)


def invert(logits: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Draw an index from softmax(logits), row by row."""
    mass = np.exp(logits - logits.max(axis=1, keepdims=True)).cumsum(axis=1)
    index = (mass <= uniform[:, np.newaxis] * mass[:, -1:]).sum(axis=1)
    return np.minimum(index, logits.shape[1] - 1)


def save(path: str | Path, images: np.ndarray, levels: int) -> None:
    """Write images side by side as a PGM (grey) or PPM (colour) file, which most viewers show."""
    n, height, width, channels = images.shape
    columns = int(np.ceil(np.sqrt(n)))
    rows = -(-n // columns)
    grid = np.zeros((rows * columns, height, width, channels), np.uint8)
    grid[:n] = np.rint(images * (255 / (levels - 1)))
    grid = grid.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    if channels not in (1, 3):
        raise SystemExit(f"images of {channels} channels have no simple file format.")
    kind = "P5" if channels == 1 else "P6"
    header = f"{kind} {columns * width} {rows * height} 255\n"
    Path(path).write_bytes(header.encode() + grid.tobytes())


def main() -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser(description="Generate images from an exported model.")
    parser.add_argument("model", help="file that imagegen.checkpoint.export wrote with format=onnx")
    parser.add_argument("out", help="image file to write: .pgm for grey, .ppm for colour")
    parser.add_argument("--n", type=int, default=16, help="number of images (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="the same images for the same seed")
    parser.add_argument("--label", type=int, default=-1, help="class, of models that know labels")
    arguments = parser.parse_args()
    session = onnxruntime.InferenceSession(arguments.model, providers=["CPUExecutionProvider"])
    levels = int(session.get_modelmeta().custom_metadata_map["levels"])
    images = generate(arguments.model, arguments.n, arguments.seed, arguments.label)
    save(arguments.out, images, levels)
    print(f"{len(images)} images: {arguments.out}")


if __name__ == "__main__":
    main()
