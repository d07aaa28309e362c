"""A hybrid's layer is the mechanism that its pattern names."""

from __future__ import annotations

from torch import Tensor

from imagegen.attention.hybrid import HybridAttention
from tests import reference as references


def reference(module: HybridAttention, x: Tensor) -> Tensor:
    """The output of `module`, literally."""
    return references.reference(module.mechanism, x)
