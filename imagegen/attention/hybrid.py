"""A hybrid model: several mechanisms repeated over the layers (for instance Lieber et al., 2024).

Axes: `b` batch, `n` position, `e` model width.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import imagegen.attention
from imagegen.attention.base import AttentionState, CausalAttention
from imagegen.core.build import build
from imagegen.core.errors import UserError


class HybridAttention(CausalAttention[AttentionState]):
    """The mechanism of this layer: `pattern[layer % len(pattern)]`.

    Jamba (Lieber et al., 2024, section 2) repeats a block of layers, one of them with softmax
    attention and the others recurrent; Griffin (De et al., 2024) repeats two recurrent layers and
    a local one. The output and the state are the mechanism's own.

    Args:
        pattern: list with, for each layer of the repeated block, the name of a mechanism with its
            default options, such as `linear`, or its name and options, such as
            {name: local, window: 16}.
        context: see `CausalAttention`; the mechanism receives the index of its layer in the model.

    Raises:
        UserError: for an empty pattern, an unknown name, and choices that the mechanism refuses.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        pattern: Any = ("linear", "linear", "softmax"),
        **context: Any,
    ) -> None:
        super().__init__(d_model, n_heads, head_dim, **context)
        if isinstance(pattern, str) or not isinstance(pattern, Sequence) or not pattern:
            raise UserError(
                f"attention.pattern={pattern or '[]'} must list at least one mechanism, "
                "such as [linear,linear,softmax]."
            )
        configs = [_config(entry) for entry in pattern]
        options = {"d_model": d_model, "n_heads": n_heads, "head_dim": head_dim, **context}
        self.mechanism = build(configs[self.layer % len(configs)], CausalAttention, **options)
        self.constant_state = self.mechanism.constant_state
        self.needs_raster = self.mechanism.needs_raster
        if self.layer == 0:
            # Entries that no layer comes to are refused as well where they are wrong.
            with torch.random.fork_rng(devices=[]):
                for config in configs[1:]:
                    build(config, CausalAttention, **options)

    def forward(
        self, x: Float[Tensor, "b n e"], state: AttentionState | None = None
    ) -> tuple[Float[Tensor, "b n e"], AttentionState]:
        y, state = self.mechanism(x, state)
        return y, state

    def step(
        self, x: Float[Tensor, "b e"], state: AttentionState
    ) -> tuple[Float[Tensor, "b e"], AttentionState]:
        return self.mechanism.step(x, state)

    def initial_state(self, batch_size: int) -> AttentionState:
        return self.mechanism.initial_state(batch_size)


def _config(entry: object) -> dict[str, Any]:
    """What `build` needs for an entry of the pattern.

    Raises:
        UserError: if the entry names no mechanism.
    """
    options = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
    name = options.pop("name", None)
    found = _mechanism(name)
    if found is None:
        names = [module.name for module in pkgutil.iter_modules(imagegen.attention.__path__)]
        offered = ", ".join(filter(_mechanism, names))
        raise UserError(
            f"attention.pattern holds {entry}, which names no mechanism; choose from {offered}, "
            "or give options as {name: local, window: 16}."
        )
    return {**options, "_target_": f"{found.__module__}.{found.__qualname__}"}


def _mechanism(name: object) -> type[CausalAttention[Any]] | None:
    """The mechanism called `name`: the one class of its kind in imagegen/attention/<name>.py."""
    modules = {module.name for module in pkgutil.iter_modules(imagegen.attention.__path__)}
    if not isinstance(name, str) or name not in modules or name == "hybrid":
        return None
    module = importlib.import_module(f"imagegen.attention.{name}")
    for _, found in inspect.getmembers(module, inspect.isclass):
        own = found.__module__ == module.__name__ and not inspect.isabstract(found)
        if own and issubclass(found, CausalAttention):
            return found
    return None
