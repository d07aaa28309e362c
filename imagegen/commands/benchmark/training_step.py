"""A training step of a small model with one attention mechanism.

Axes: `b` batch, `n` position, `e` model width.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from imagegen.commands.benchmark.contestants import Trainer
from imagegen.commands.benchmark.setting import Setting

if TYPE_CHECKING:
    import torch
else:  # Annotations are checked in tests; torch is not to be imported for them.
    torch = Any

N_LAYERS = 2
FEED_FORWARD = 4
"""Width of the feed-forward layers, in widths of the model."""

_FIRST = 128


@dataclass(frozen=True)
class TrainingStep:
    """Forward and backward pass of two blocks of the default model; a job for a `Worker`.

    The input, random "b n e", needs its gradient, as one that comes from an embedding does. The
    loss is the mean square of the output. An image of that many positions is taken to be square, so
    that its rows are sqrt(length) long, rounded up.

    Attributes:
        attention: `_target_` and options of the mechanism.
        length: positions `n`.
    """

    attention: dict[str, Any]
    length: int
    d_model: int
    n_heads: int
    batch_size: int
    seed: int
    threads: int
    device: str

    def prepare(self) -> Callable[[], None]:
        """Build the model and its input; returns the step."""
        import torch

        from imagegen.attention.base import CausalAttention
        from imagegen.core.build import build
        from imagegen.model.block import Block, BlockOptions

        torch.manual_seed(self.seed)
        device = torch.device(self.device)
        options = BlockOptions(self.d_model, self.n_heads, FEED_FORWARD * self.d_model)
        blocks = torch.nn.ModuleList(
            Block(
                build(
                    self.attention,
                    CausalAttention,
                    d_model=self.d_model,
                    n_heads=self.n_heads,
                    row_length=row_length(self.length),
                    layer=layer,
                ),
                options,
                row_length(self.length),
            )
            for layer in range(N_LAYERS)
        ).to(device)
        x = torch.randn(self.batch_size, self.length, self.d_model, device=device)

        def step(inputs: torch.Tensor) -> None:
            # The gradients of the parameters are kept: they are part of what the process holds.
            y = inputs.detach().requires_grad_()
            for block in blocks:
                y, _ = block(y, None)
            y.square().mean().backward()

        # A short one, so that what is loaded and allocated once is not taken for the step's own.
        step(x[:, :_FIRST])
        return lambda: step(x)


def row_length(length: int) -> int:
    """Length of a row of a square image of so many positions, rounded up."""
    return math.isqrt(length - 1) + 1


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
