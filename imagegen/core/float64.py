"""Where float64 is computed: on a tensor's own device or, where that has none, on the CPU."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

WITHOUT = ("mps",)
"""Types of devices that have no float64."""


def float64_device(device: torch.device) -> torch.device:
    """Where numbers of `device` are computed with in float64: there, or on the CPU."""
    return torch.device("cpu") if device.type in WITHOUT else device


def to_float64(tensor: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """The numbers in float64, on the `float64_device` of their device."""
    # Moved first: the device could not convert them.
    return tensor.to(float64_device(tensor.device)).double()
