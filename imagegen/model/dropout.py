"""Dropout whose random numbers do not take longer than the layers around it."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

_LEVELS = 1 << 16


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`; on the CPU, 16 random bits decide of each number.

    PyTorch draws 64 bits for each, one after the other on one core, which took a fifth of a
    training step. The probability is rounded to a multiple of 2^-16, and what is left is scaled
    accordingly. The bits depend on torch's seed.
    """

    def forward(self, input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Zero numbers at random and scale the others, while training."""
        threshold = round(self.p * _LEVELS)
        inactive = not self.training or not 0 < threshold < _LEVELS
        if inactive or input.device.type != "cpu" or self.inplace:
            return super().forward(input)
        seed = int(torch.randint(1 << 62, ()))
        words = math.ceil(input.numel() / 4)
        bits = np.random.Generator(np.random.SFC64(seed)).integers(
            0, 1 << 64, size=words, dtype=np.uint64
        )
        drawn = torch.from_numpy(bits.view(np.int16))[: input.numel()].view(input.shape)
        # As signed numbers, 2^15 lower.
        kept = (drawn >= threshold - _LEVELS // 2).to(input.dtype)
        return input * kept.mul_(_LEVELS / (_LEVELS - threshold))
