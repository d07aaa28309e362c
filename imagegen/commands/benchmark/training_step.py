"""A training step of a small model with one attention mechanism.

Axes: `b` batch, `n` position, `e` model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

N_LAYERS = 2
FEED_FORWARD = 4
"""Width of the feed-forward layers, in widths of the model."""

_FIRST = 128


@dataclass(frozen=True)
class TrainingStep:
    """Forward and backward pass of two blocks of the default model; a job for a `Worker`.

    The input, random "b n e", asks for its gradient, as one that comes from an embedding does. The
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
