"""Our mechanisms beside code that was not written here, with the same weights.

A test of a package that is not installed is skipped; CONTRIBUTING.md tells how to install them.
Each test prints the largest differences that it saw, which `pytest -rP` shows.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imagegen.attention.base import CausalAttention

BATCH, D_MODEL, N_HEADS = 2, 32, 4
HEAD_DIM = D_MODEL // N_HEADS


def peer(module: str, package: str) -> Any:
    """A module of a package that need not be installed."""
    with warnings.catch_warnings():
        # What is deprecated in them is not ours to fix.
        warnings.simplefilter("ignore")
        return pytest.importorskip(module, reason=f"needs {package}; see CONTRIBUTING.md, Peers")


@dataclass
class Result:
    """An output, and the gradients of its weighted sum: of the input, then of the weights."""

    y: Tensor
    gradients: list[Tensor]


def inputs(length: int, scale: float = 1.0) -> Tensor:
    """An input "b n e" that wants a gradient."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(BATCH, length, D_MODEL, dtype=torch.float64, generator=generator)
    return (scale * x).requires_grad_()


def layer(cls: type[CausalAttention], **options: Any) -> CausalAttention:
    """One of our mechanisms, whose weights are large enough to make a difference."""
    torch.manual_seed(0)
    module = cls(D_MODEL, N_HEADS, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / D_MODEL**0.5)
    return module.double()


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A linear layer with a copy of these weights."""
    module = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(bias)
    return module


def projections(module: CausalAttention) -> list[nn.Linear]:
    """Copies of our projections to queries, keys, values and back."""
    qkv, out = module.qkv, module.out
    parts = zip(qkv.weight.chunk(3), qkv.bias.chunk(3), strict=True)
    return [*(linear(weight, bias) for weight, bias in parts), linear(out.weight, out.bias)]


def result(y: Tensor, x: Tensor, layers: Sequence[Sequence[nn.Linear]]) -> Result:
    """The gradients of linear layers, those of each group joined as one layer would have them."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(y.shape, dtype=torch.float64, generator=generator).to(y.dtype)
    parameters = list(
        itertools.chain.from_iterable((one.weight, one.bias) for group in layers for one in group)
    )
    x_gradient, *rest = torch.autograd.grad((y * weights).sum(), [x, *parameters])
    gradients = [x_gradient]
    for group in layers:
        mine, rest = rest[: 2 * len(group)], rest[2 * len(group) :]
        gradients += [torch.cat(mine[0::2]), torch.cat(mine[1::2])]
    return Result(y, gradients)


def stepped(step: Callable[[Tensor, Any], tuple[Tensor, Any]], x: Tensor, state: Any) -> Tensor:
    """The outputs of a step by step form over the whole sequence."""
    outputs = []
    for position in range(x.shape[1]):
        y, state = step(x[:, position], state)
        outputs.append(y)
    return torch.stack(outputs, dim=1)


def assert_same(ours: Result, theirs: Result, tolerance: float, for_gradients: float) -> None:
    """Outputs and gradients agree, relative to the largest number of each of theirs."""
    output = _difference(ours.y, theirs.y)
    gradients = [
        _difference(mine, other)
        for mine, other in zip(ours.gradients, theirs.gradients, strict=True)
    ]
    print(f"largest difference of outputs {output:.1e}, of gradients {max(gradients):.1e}")
    assert output <= tolerance
    assert max(gradients) <= for_gradients


def _difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    largest = theirs.abs().max().double()
    assert largest.isfinite()
    assert largest > 0
    return ((ours.double() - theirs.double()).abs().max() / largest).item()
