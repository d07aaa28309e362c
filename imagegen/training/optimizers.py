"""How optimizers are made of what the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]


def build_optimizer(factory: OptimizerFactory, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of all parameters of a model.

    Args:
        factory: a class of optimizers or a partial call of one. Where the class has a true
            attribute `wants_names`, it is given what `named_parameters` yields.
        model: whose parameters these are.
    """
    names = getattr(getattr(factory, "func", factory), "wants_names", False)
    return factory(model.named_parameters() if names else model.parameters())
