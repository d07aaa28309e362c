"""A training step of a whole model; what `train` measures in a process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from imagegen.commands.benchmark.contestants import Trainer
from imagegen.commands.benchmark.setting import Setting

if TYPE_CHECKING:
    import torch
else:  # Annotations are checked in tests; torch is not to be imported for them.
    torch = Any

CLIP = 1.0
"""Norm to which gradients are clipped, as `conf/trainer` has it."""


@dataclass(frozen=True)
class ModelStep:
    """Forward and backward pass, gradient clipping and optimizer; a job for a `Worker`.

    The images are random. A step with one image comes first, so that weights, their gradients and
    the optimizer's own numbers are not counted in the peak memory of a step.

    Attributes:
        trainer: what trains.
        optimizer: `_target_` and options, `_partial_`.
        batch_size: images of a step.
    """

    trainer: Trainer
    setting: Setting
    optimizer: dict[str, Any]
    batch_size: int
    threads: int
    device: str

    def prepare(self) -> Callable[[], None]:
        """Build the model and its optimizer; returns the step."""
        import torch
        from hydra.utils import instantiate

        from imagegen.training.optimizers import build_optimizer

        torch.manual_seed(self.setting.seed % 2**63)
        module, loss = self._module()
        optimizer = build_optimizer(instantiate(self.optimizer), module)
        spec = self.setting.spec
        shape = (self.batch_size, spec["height"], spec["width"], spec["channels"])
        images = torch.randint(0, spec["levels"], shape, dtype=torch.uint8, device=self.device)
        kind = torch.device(self.device).type

        def step(images: torch.Tensor) -> None:
            optimizer.zero_grad()
            with torch.autocast(kind, torch.bfloat16, enabled=self.trainer.bf16):
                value = loss(images)
            value.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()

        step(images[:1])
        return_free_memory()
        return lambda: step(images)

    def _module(self) -> tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
        if self.trainer.peer:
            from imagegen.commands.benchmark.peer_library import PeerTrainer

            peer = PeerTrainer(self.setting, self.trainer.attention, self.device)
            return peer.train(), peer.loss
        model = self.setting.build(self.trainer.attention).to(self.device).train()
        return model, lambda images: model.bits_per_dim(images).mean()


def return_free_memory() -> None:
    """Give memory that the allocator holds on to back, where it is glibc's.

    What is left of a small step would otherwise be used by a measured one, and not be counted.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
