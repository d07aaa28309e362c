"""How optimizers are made of what the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from imagegen.core.build import build_section
from imagegen.core.errors import UserError

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


def optimizer_factory(cfg: DictConfig, model: nn.Module) -> OptimizerFactory:
    """The optimizer's factory, tried once, so that bad settings are refused before a run begins."""
    factory: OptimizerFactory = build_section(cfg.optimizer, "optimizer", Callable)
    try:
        optimizer = build_optimizer(factory, model)
    # Settings of all kinds meet foreign code here.
    except Exception as error:
        typed = [f"optimizer.{key}={cfg.optimizer[key]}" for key in cfg.optimizer if key[0] != "_"]
        raise UserError(
            f"the optimizer rejects its settings: {error}; check {', '.join(typed)}."
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer._target_={cfg.optimizer.get('_target_')} is not an optimizer of PyTorch; "
            "choose one, such as torch.optim.AdamW."
        )
    return factory
