"""Write one of the checkpoints of this folder: `python tests/checkpoints/make.py NAME`.

Each is a run of train.py on the digits, far too short and too small to draw digits, together with
what it scored and drew on the day it was made (`NAME.npz`: `images`, their `bits_per_dim`, and the
first images of seed 0, `drawn`). `tests/test_old_checkpoints.py` loads all that are here. They are
never made again: a change that breaks one breaks the users' checkpoints. A new format gets new
files beside the old ones, named after it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from imagegen.checkpoint.reading import FORMAT_VERSION, load_checkpoint
from imagegen.data.digits import Digits
from imagegen.generation.sampling_loop import generate

FOLDER = Path(__file__).parent
OPTIONS = [
    *("trainer=cpu", "trainer.max_steps=30", "logger=none"),
    *("model.n_layers=1", "model.d_model=16", "model.d_ff=16", "model.n_heads=2"),
]
CHOICES = {
    "default-linear": ["model.embedding.neighbours=[[0,-1],[-1,0],[-1,1]]", "head.n_mixtures=2"],
    "paper-softmax": ["model=paper", "model.head_dim=8", "attention=softmax", "head=categorical"],
    "hybrid": ["model=paper", "model.head_dim=8", "model.n_layers=3", "attention=hybrid"],
    "labels": [
        *("model.conditional=true", "model.convolution=[1,1]", "model.gated=true"),
        *("model.norm=rms", "model.residual_scale=0.1", "head.n_mixtures=2"),
        "model.embedding.neighbours=[[0,-1],[-1,0]]",
    ],
    "label-grid": [
        *("model.conditional=true", "model.label_grid=3", "head=categorical"),
        "model.embedding.neighbours=[[0,-1],[-1,0]]",
    ],
}
IMAGES = 4


def make(name: str, folder: Path = FOLDER) -> Path:
    """Train the choice `name` and put its files into `folder`."""
    path = folder / f"format{FORMAT_VERSION}-{name}.ckpt"
    if path.exists():
        raise SystemExit(f"{path} exists, and is kept as it is.")
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary).resolve() / "run"
        subprocess.run(
            [sys.executable, "train.py", *OPTIONS, *CHOICES[name], f"hydra.run.dir={run}"],
            cwd=Path(__file__).parents[2],
            check=True,
        )
        content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
        torch.save(placeless(content, str(run)), path)
    model = load_checkpoint(path).model
    images = np.array(Digits().split("test").images[:IMAGES])
    with torch.inference_mode():
        bits_per_dim = model.bits_per_dim(torch.from_numpy(images)).double().numpy()
    drawn = next(generate(model, IMAGES, seed=0))
    np.savez_compressed(
        path.with_suffix(".npz"), images=images, bits_per_dim=bits_per_dim, drawn=drawn
    )
    return path


def placeless(content: Any, run: str) -> Any:
    """Plain containers with `RUN` in the place of the run folder, which is gone soon."""
    if isinstance(content, str):
        return content.replace(run, "RUN")
    if isinstance(content, Mapping):
        items = [(placeless(key, run), placeless(value, run)) for key, value in content.items()]
        return type(content)(items)  # type: ignore[call-arg]
    if isinstance(content, list | tuple):
        return type(content)(placeless(item, run) for item in content)
    return content


if __name__ == "__main__":
    for chosen in sys.argv[1:] or CHOICES:
        print(make(chosen))
