"""Whole commands on a simulated device: they say `cpu`, or nothing, and get the device."""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.cli.entry import compose
from imagegen.commands import find_lr as command
from imagegen.core import machine
from imagegen.core import values as options
from imagegen.evaluation import codec
from imagegen.evaluation import scores as evaluate
from imagegen.evaluation import verification as verify
from imagegen.generation import decode
from imagegen.generation.decode import graph
from imagegen.training import learning_rate
from imagegen.training.module import ImageModule
from tests.devices.simulated import Simulation
from tests.helpers import (
    DRAWING,
    SMALL,
    read_images,
    run_main,
    run_train,
    sample,
    save_colour_checkpoint,
)


@contextlib.contextmanager
def everything_on(simulation: Simulation) -> Iterator[None]:
    """Lightning and the commands use the device; a GPU's steps are done unrecorded."""
    unrecorded: Any = functools.partial(graph.GraphDecoder, record=False)
    with simulation, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # PyTorch looks for a device to pin memory for, and there is none.
        warnings.filterwarnings("ignore", "'pin_memory' argument is set as true", UserWarning)
        made, train = SingleDeviceStrategy.__init__, ImageModule.training_step

        def there(self: SingleDeviceStrategy, device: Any, *args: Any, **kwargs: Any) -> None:
            made(self, simulation.device, *args, **kwargs)

        def on_device(self: ImageModule, batch: Any, *args: Any) -> Tensor:
            assert self.model.device == batch["images"].device == simulation.device
            return train(self, batch, *args)

        patch.setattr(SingleDeviceStrategy, "__init__", there)
        patch.setattr(CPUAccelerator, "setup_device", lambda self, device: None)
        patch.setattr(ImageModule, "training_step", on_device)
        patch.setattr(options, "resolve_device", lambda value: simulation.device)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(torch.cuda, "get_device_name", lambda device: "a simulated GPU")
        patch.delenv(machine.FORCE_BF16, raising=False)
        patch.setattr(graph, "GraphDecoder", unrecorded)
        patch.setattr(decode, "SHORTEST", 1)
        yield


def trains_and_resumes(simulation: Simulation, folder: Path, *more: str) -> None:
    """`train.py`, pictures of validations included, and on from its checkpoint."""
    options_ = (*DRAWING, f"hydra.run.dir={folder}", "callbacks.ema.decay=0.9", *more)
    with everything_on(simulation), pytest.MonkeyPatch.context() as patch:
        assert run_train(patch, *options_, "trainer.max_epochs=1") == 0
        assert len(list((folder / "samples").iterdir())) == 2
        # Adam's state goes back to the device.
        more_ = ("callbacks.grids.n_samples=0", "callbacks.grids.n_completed=0")
        assert run_train(patch, f"resume={folder}", "trainer.max_epochs=2", *more_) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["state"] == "finished"
    assert summary["epochs"] == 2
    # What is written can be read where the device is not.
    weights = load_checkpoint(folder).model.state_dict().values()
    assert all(type(weight) is torch.Tensor for weight in weights)


def finds_a_rate(simulation: Simulation) -> None:
    """`imagegen find-lr`, in bfloat16."""
    options_ = ("batch_size=8", "trainer.precision=bf16-mixed")
    with everything_on(simulation), pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning_rate, "STEPS", 30)
        assert run_main(patch, command.main, "find_lr", *SMALL[:6], *options_) == 0


def commands(simulation: Simulation, folder: Path) -> None:
    """Every command that takes a checkpoint; pictures are those that the CPU draws."""
    ckpt = save_colour_checkpoint(folder, 2, 3)
    images = f"images={folder / 'photos' / '0.png'}"
    completing = ["task=complete", images, "completions=2"]
    region = ["visible=right:0.5", "particles=8"]
    drawn = {"samples": ["n=2"], "completions": completing, "regions": [*completing, *region]}
    for name, options_ in drawn.items():
        sample(ckpt, folder / f"{name}-cpu", *options_)
    with everything_on(simulation):
        for name, options_ in drawn.items():
            found = read_images(sample(ckpt, folder / name, *options_))
            expected = read_images(folder / f"{name}-cpu")
            assert found.keys() == expected.keys()
            for file, image in found.items():
                np.testing.assert_array_equal(image, expected[file])
        score = evaluate.run(compose("evaluate", [f"ckpt={ckpt}", "split=train"]))
        assert score["bits_per_dim"] > 0
        score = evaluate.run(compose("evaluate", [f"ckpt={ckpt}", "split=train", *region]))
        assert score["bits_per_hidden_value"] > 0
        code = codec.compress(
            compose("compress", [f"ckpt={ckpt}", images, f"out={folder / 'code'}"])
        )
        back = compose("decompress", [f"ckpt={ckpt}", f"file={code}", f"out={folder / 'back'}"])
        assert (codec.decompress(back) / "00000.png").exists()
        assert verify.run(compose("verify", [f"ckpt={ckpt}"]))["ok"]
