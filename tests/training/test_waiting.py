"""How often a training step waits for the device, with the CPU in the place of a GPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from imagegen.core.spec import ImageSpec
from imagegen.generation.decode.waiting import Waiting, no_waiting
from imagegen.training.averaging import WeightAverage
from imagegen.training.module import ImageModule
from tests.generation.decode.cuda_recorder import needs_fake_cuda, sync_debug_modes, to_fake_cuda
from tests.helpers import SMALL, run_train, tiny_model

# Counts of steps, which stay on the CPU: the optimizers' own, and that of the average (see below).
ON_THE_CPU = {"_get_value", "update_parameters"}


class Steps(Callback):
    """Counts optimizer steps and, in each of them, reads by the functions that they come from."""

    def __init__(self) -> None:
        self.reads: list[Counter[str]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        while len(self.reads) <= trainer.global_step:
            self.reads.append(Counter())

    def found(self, operation: str) -> None:
        """Note a read; those of data loaders are of data on the CPU."""
        stack = list(_functions())
        if self.reads and not any("utils/data" in file for file, _ in stack):
            known = [name for _, name in stack if name in KNOWN]
            self.reads[-1][known[0] if known else f"{operation} in {stack[:8]}"] += 1


KNOWN = {*ON_THE_CPU, "on_before_optimizer_step", "convert_tensors_to_scalars"}


def _functions() -> Iterator[tuple[str, str]]:
    """Files and names of the functions that run, the innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


def _train(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> list[Counter[str]]:
    """The reads of each optimizer step, without those of the first and last batch."""
    steps = Steps()
    monkeypatch.setattr("tests.training.test_waiting.make", lambda: steps, raising=False)
    for name in ("tolist", "numpy", "cpu"):  # which see no need to wait for the CPU
        whole: Callable[..., Any] = getattr(Tensor, name)

        def watched(tensor: Tensor, *arguments: Any, whole: Any = whole, name: str = name) -> Any:
            steps.found(name)
            return whole(tensor, *arguments)

        monkeypatch.setattr(Tensor, name, watched)
    arguments = [
        *SMALL,
        "+callbacks.steps._target_=tests.training.test_waiting.make",
        "trainer.max_epochs=1",
        "trainer.limit_val_batches=0",
        "trainer.log_every_n_steps=1000",
        f"hydra.run.dir={folder / 'run'}",
        *options,
    ]
    with Waiting(steps.found):
        assert run_train(monkeypatch, *arguments) == 0
    return steps.reads[1:-1]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["trainer.accumulate_grad_batches=2", "callbacks.ema.decay=0.9"],
        ["optimizer=radam"],
        ["optimizer=muon", "model.conditional=true", "model.dropout=0.0"],
        ["model.order=any"],
    ],
    ids=lambda options: " ".join(options),
)
def test_a_step_reads_one_number_back(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its gradients are finite, see `BadNumbers`; the loss is read for progress bars."""
    reads = _train(monkeypatch, tmp_path, *options)
    assert len(reads) == (1 if "trainer.accumulate_grad_batches=2" in options else 4)
    for step in reads:
        for name in (*ON_THE_CPU, "convert_tensors_to_scalars"):
            step.pop(name, None)
        assert step == {"on_before_optimizer_step": 1}


def test_without_a_progress_bar_the_loss_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in _train(monkeypatch, tmp_path):
        assert "convert_tensors_to_scalars" not in step


def test_the_average_is_on_the_device_and_its_count_on_the_cpu() -> None:
    """Callbacks are set up before Lightning moves the model, whose device is the CPU until then."""
    module = ImageModule(tiny_model(ImageSpec(4, 4, 1)), torch.optim.SGD)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy._root_device = torch.device("meta")  # type: ignore[attr-defined]
    callback = WeightAverage(0.9)
    callback.setup(trainer, module, "fit")
    average = callback._average_model
    assert average is not None
    assert {p.device.type for p in average.module.parameters()} == {"meta"}
    assert average.n_averaged.device.type == "cpu"
    average.update_parameters(module.to("meta"))
    assert average.n_averaged == 1


@needs_fake_cuda
@pytest.mark.parametrize("order", ["raster", "any"])
def test_the_loss_is_computed_without_waiting(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sync_debug_modes(monkeypatch)
    embedding = {"_target_": "imagegen.model.embeddings.Neighbourhood"}
    model = tiny_model(ImageSpec(4, 4, 1), embedding=embedding, order=order).train()
    module = ImageModule(model, torch.optim.SGD)
    with FakeTensorMode():
        to_fake_cuda(model)
        images = torch.zeros(2, 4, 4, 1, dtype=torch.uint8, device="cuda")
        with no_waiting(images.device):
            if order == "any":
                module._region_loss(images, None, None)
            else:
                model.bits_per_dim(images)
