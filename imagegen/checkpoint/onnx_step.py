"""A model's step as a function of tensors alone, as `imagegen.checkpoint.onnx` needs it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.core.errors import UserError
from imagegen.model.state import named_tensors, with_tensors
from imagegen.model.transformer import NO_LABEL, ImageTransformer


class SingleStep(nn.Module):
    """A model's step as a function of tensors only, on a copy of the model, in float32.

    Raises:
        UserError: for attention whose state grows, as no graph of fixed tensors can.
    """

    def __init__(self, model: ImageTransformer) -> None:
        super().__init__()
        if not model.constant_state:
            raise UserError(
                "this model's attention keeps all earlier positions, so its state grows with every "
                "step and has no place in an ONNX file; export a model whose state keeps its size, "
                "such as one with attention=linear."
            )
        self.model = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
        _replace_bags(self.model)
        self.initial = self.model.initial_state(1)
        self.labelled = self.model.n_classes is not None
        # Images are drawn as they are, which needs no input.
        self.initial = dataclasses.replace(self.initial, labels=None, orientation=None)
        self.state = {
            name: tensor for name, tensor in named_tensors(self.initial) if tensor.numel() > 0
        }

    def forward(
        self, token: Tensor, position: Tensor, others: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Shapes and dtypes as the module says.

        Args:
            others: the labels, where the model has classes, and the state, in the order of
                `self.state`. PyTorch 2.9 cannot export a function of `*others`.
        """
        batch, label = token.shape[0], None
        if self.labelled:
            label, *others = others
        given = dict(zip(self.state, others, strict=True))
        before = with_tensors(self.initial, given, "", position, batch)
        before = dataclasses.replace(before, labels=label)
        parameters, state = self.model.step(token.to(torch.uint8), before)
        found = dict(named_tensors(state))
        # PyTorch 2.9 gives an input that is an output as well a name of its own.
        after = [found[name] for name in self.state]
        return parameters, *(tensor.clone() for tensor in after)

    def inputs(self, batch: int) -> dict[str, Tensor]:
        """Of the first step, by name."""
        values = self.model.raster.values_per_step
        label = {"label": torch.full((batch,), NO_LABEL)} if self.labelled else {}
        return {
            "token": torch.zeros(batch, values, dtype=torch.int64),
            "position": torch.tensor(0),
            **label,
            **{name: t.repeat_interleave(batch, dim=0) for name, t in self.state.items()},
        }


class _SummedEmbedding(nn.Module):
    """What `EmbeddingBag` gives, in operations that the exporter translates rightly."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, cast(Tensor, self.weight)).sum(dim=1)


def _replace_bags(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.EmbeddingBag) and child.mode == "sum":
                setattr(module, name, _SummedEmbedding(child.weight.detach()))
