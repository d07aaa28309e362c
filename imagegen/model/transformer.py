"""The model: embeddings of what came before, causal attention blocks, a distribution per value.

Axes: `b` batch, `h w c` height, width, channel, `n` position, `s` values per step, `e` model width,
`p` parameters of the output distribution.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn

from imagegen.attention.base import AttentionState, CausalAttention
from imagegen.core.build import build
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.heads.base import OutputHead
from imagegen.model.block import NORMS, Block, BlockOptions, Dropout, known
from imagegen.model.canvas import Canvas
from imagegen.model.embeddings import LinearPrediction, Raster
from imagegen.model.known_neighbourhood import (
    KnownNeighbourhood,
    KnownPrediction,
    build_embedding,
)
from imagegen.model.labels import LabelEmbedding
from imagegen.model.option_groups import ConditionOptions, SequenceOptions
from imagegen.model.orientations import check_orders
from imagegen.model.state import ModelState as ModelState

NO_LABEL = -1


class ImageTransformer(nn.Module):
    """An autoregressive transformer over the values of an image.

    It is trained with all positions in parallel (`parameters_of`, `log_prob`) and generates from a
    recurrent state (`prefill`, `step`); both forms share the weights and agree.

    Args:
        spec: size, channels and levels of the images.
        attention, head, embedding: plain dictionaries, a `_target_` of this package and options.
        n_layers: number of blocks.
        block: what each of them takes.
        sequence: how an image becomes a sequence, and which part of it training predicts.
        condition: the labels and orientations that the model knows.
        linear_prediction: whether distributions that can do so are around a `LinearPrediction`.

    Raises:
        UserError: for sizes and names that make no model.
    """

    def __init__(
        self,
        spec: ImageSpec,
        attention: Mapping[str, Any],
        head: Mapping[str, Any],
        embedding: Mapping[str, Any],
        n_layers: int,
        block: BlockOptions,
        sequence: SequenceOptions,
        condition: ConditionOptions,
        linear_prediction: bool = False,
    ) -> None:
        super().__init__()
        if n_layers < 1:
            raise UserError(f"model.n_layers={n_layers} must be at least 1.")
        check_orders(condition.orders, spec.height, spec.width)
        d_model = block.d_model
        self.spec = spec
        self.raster = Raster(spec, sequence.tokens)
        self.order, self.whole_images = sequence.order, sequence.whole_images
        self.visible_weight = sequence.visible_weight
        self.n_classes, self.label_dropout = condition.n_classes, condition.label_dropout
        self.embedding = build_embedding(embedding, d_model, self.raster, self.order)
        orders = condition.orders
        self.label = None
        if self.n_classes is not None:
            self.label = LabelEmbedding(
                self.n_classes, d_model, self.raster, condition.label_grid, orders
            )
        self.turns_areas = orders > 1
        self.orders = max(orders, 2) if condition.flips else orders
        self.flip = nn.Embedding(self.orders, d_model) if self.orders > 1 else None
        if self.flip is not None:
            nn.init.normal_(self.flip.weight, std=d_model**-0.5)
        sizes = {"d_model": d_model, "n_heads": block.n_heads, "head_dim": block.head_dim}
        row_length = self.raster.row_length
        self.blocks = nn.ModuleList(
            Block(
                build(attention, CausalAttention, row_length=row_length, layer=layer, **sizes),
                block,
                row_length,
            )
            for layer in range(n_layers)
        )
        if self.order == "any":
            for each in self._blocks():
                each.check_any_order()
        self.norm = known("norm", block.norm, NORMS)(d_model)
        self.dropout = Dropout(block.dropout)
        self.head = build(
            head,
            OutputHead,
            d_model=d_model,
            levels=spec.levels,
            values_per_step=self.raster.values_per_step,
        )
        self.prediction: LinearPrediction | None = None
        if linear_prediction and self.head.takes_prediction:
            if not self.embedding.n_numbers:
                raise UserError(
                    "model.linear_prediction=true needs an embedding that sees neighbours, but "
                    f"model.embedding is {type(self.embedding).__name__}; leave it false."
                )
            if isinstance(self.embedding, KnownNeighbourhood):
                self.prediction = KnownPrediction(self.embedding)
            else:
                self.prediction = LinearPrediction(self.embedding)
            self.head.start_from_prediction()

    @classmethod
    def from_options(cls, spec: ImageSpec, **options: Any) -> ImageTransformer:
        """A model of options as configurations and checkpoints hold them, all in one dictionary.

        Raises:
            UserError: for sizes and names that make no model.
        """
        groups = {}
        for group, kind in OPTION_GROUPS.items():
            names = {field.name for field in dataclasses.fields(kind)} & options.keys()
            groups[group] = kind(**{name: options.pop(name) for name in names})
        return cls(spec, **groups, **options)

    def parameters_of(
        self,
        sequence: UInt8[Tensor, "b n s"],
        labels: Int64[Tensor, " b"] | None = None,
        orientation: Int64[Tensor, " b"] | None = None,
        visible: Bool[Tensor, "b h w"] | None = None,
    ) -> Float[Tensor, "b n p"]:
        """Distributions of the first n steps, each given the values before it (teacher forcing).

        The order of the steps is that of `Raster.to_sequence` for the visible pixels.
        """
        if self.training and labels is not None:
            withheld = torch.rand(labels.shape, device=labels.device) < self.label_dropout
            labels = labels.masked_fill(withheld, NO_LABEL)
        labels = self._known(len(sequence), labels)
        step = torch.arange(sequence.shape[1], device=sequence.device)
        canvas = self._canvas(len(sequence), visible)
        seen: Tensor | Canvas = self._padded(sequence[:, :-1])
        if canvas is not None:
            seen = canvas.taken(sequence, step)
        return self._parallel(seen, step, None, labels, orientation)[0]

    def log_prob(
        self,
        images: UInt8[Tensor, "b h w c"],
        labels: Int64[Tensor, " b"] | None = None,
        orientation: Int64[Tensor, " b"] | None = None,
        visible: Bool[Tensor, "b h w"] | None = None,
    ) -> Float[Tensor, "b n s"]:
        """Natural log-probability of every value of the images, in the order of the steps.

        Args:
            images: levels.
            labels: 0 to n_classes - 1, or -1 for no label; none by default. Models without classes
                ignore them.
            orientation: of the images, 0 to `orders` - 1; 0 by default. Models of one ignore it.
            visible: the pixels that come first, of models that know any order; their number may
                differ between images. None by default: the order is that of the raster.

        Raises:
            UserError: for visible pixels and a model that knows the order of the raster only.
        """
        sequence = self.raster.to_sequence(images, visible)
        parameters = self.parameters_of(sequence, labels, orientation, visible)
        return self.head.log_prob(parameters, sequence)

    def bits_per_dim(
        self,
        images: UInt8[Tensor, "b h w c"],
        labels: Int64[Tensor, " b"] | None = None,
        orientation: Int64[Tensor, " b"] | None = None,
        visible: Bool[Tensor, "b h w"] | None = None,
    ) -> Float[Tensor, " b"]:
        """Negative log2-likelihood of each image, divided by its number of dimensions.

        With visible pixels, it is that of the others given them, divided by the number of those
        others' values; each image needs one.
        """
        nats = -self.log_prob(images, labels, orientation, visible)
        if visible is None:
            return nats.flatten(1).mean(dim=1) / math.log(2)
        kept = self.raster.kept_steps(visible)
        step = torch.arange(nats.shape[1], device=nats.device)
        hidden = torch.where(step >= kept.unsqueeze(1), nats.sum(dim=2), 0).sum(dim=1)
        return hidden / ((len(step) - kept) * nats.shape[2] * math.log(2))

    def initial_state(
        self,
        batch_size: int,
        labels: Int64[Tensor, " b"] | None = None,
        visible: Bool[Tensor, "b h w"] | None = None,
        orientation: Int64[Tensor, " b"] | None = None,
    ) -> ModelState:
        """The state before the first step, of images of these labels and orientations.

        Arguments are those of `log_prob`.

        Raises:
            UserError: for visible pixels and a model that knows the order of the raster only.
        """
        recent = torch.zeros(
            batch_size,
            self.embedding.lookback,
            self.raster.values_per_step,
            dtype=torch.uint8,
            device=self.device,
        )
        layers = [block.initial_state(batch_size) for block in self._blocks()]
        if self.flip is None:
            orientation = None
        elif orientation is None:
            orientation = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        known, canvas = self._known(batch_size, labels), self._canvas(batch_size, visible)
        return ModelState(0, recent, layers, known, orientation, canvas)

    def prefill(
        self,
        prefix: UInt8[Tensor, "b n s"],
        state: ModelState | None = None,
        labels: Int64[Tensor, " b"] | None = None,
        orientation: Int64[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b p"], ModelState]:
        """Take in a known part of the sequence through the parallel form.

        Args:
            prefix: values of the first n steps, or of the n steps that follow those of `state`.
            state: continue from here; the beginning, of images of these `labels` and
                orientations, by default.
            labels, orientation: see `log_prob`; a `state` has its own.

        Returns:
            The distribution of the step after the prefix, and the state to continue from.
        """
        state = state or self.initial_state(prefix.shape[0], labels, orientation=orientation)
        # The first step of all has no value before it, so its prediction is still to be made.
        skipped = 0 if state.position == 0 else 1
        first, count = state.position - skipped, prefix.shape[1]
        step = torch.arange(first, first + count + 1, device=prefix.device)
        canvas = state.canvas
        window = torch.cat([state.recent, prefix], dim=1)
        if canvas is not None:
            canvas = canvas.clone().taken(prefix, step[:-1])
        parameters, layers = self._parallel(
            window[:, skipped:] if canvas is None else canvas,
            step[skipped:],
            state.layers,
            state.labels,
            state.orientation,
        )
        recent = window[:, window.shape[1] - self.embedding.lookback :].clone()
        after = dataclasses.replace(
            state, position=first + count + 1, recent=recent, layers=layers, canvas=canvas
        )
        return parameters[:, -1], after

    def step(
        self, values: UInt8[Tensor, "b s"] | None, state: ModelState
    ) -> tuple[Float[Tensor, "b p"], ModelState]:
        """The distribution of the next step.

        Args:
            values: levels of the step before, whose distribution was computed last; None for the
                first step.
            state: carried from the step before; its memory may be reused.
        """
        recent, canvas = state.recent, state.canvas
        step = state.position + torch.arange(1, device=recent.device)
        if values is not None:
            recent = torch.cat([recent, values.unsqueeze(1)], dim=1)[:, 1:]
            if canvas is not None:
                # While a step is exported, the first one is given values too, that it ignores.
                canvas = canvas.taken(values.unsqueeze(1), (step - 1).clamp(min=0))
        seen = recent if canvas is None else canvas
        inputs, predicted = self._inputs(seen, step, state.labels, state.orientation)
        x = inputs.squeeze(1)
        layers = []
        for block, layer in zip(self._blocks(), state.layers, strict=True):
            x, layer = block.step(x, layer)
            layers.append(layer)
        parameters = self.head(self.norm(x), None if predicted is None else predicted.squeeze(1))
        after = dataclasses.replace(
            state, position=state.position + 1, recent=recent, layers=layers, canvas=canvas
        )
        return parameters, after

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return cast(Tensor, self.norm.weight).device

    @property
    def constant_state(self) -> bool:
        """Whether the state has the same size at every position, as the attention decides."""
        return all(block.attention.constant_state for block in self._blocks())

    def _blocks(self) -> Iterator[Block]:
        return cast(Iterator[Block], iter(self.blocks))

    def _padded(self, sequence: Tensor) -> Tensor:
        batch, _, values = sequence.shape
        return torch.cat(
            [sequence.new_zeros(batch, self.embedding.lookback, values), sequence], dim=1
        )

    def _known(self, batch_size: int, labels: Tensor | None) -> Tensor | None:
        """Labels of the images, of models that know some."""
        if self.n_classes is None:
            return None
        if labels is None:
            labels = torch.full((batch_size,), NO_LABEL, device=self.device)
        return labels

    def _canvas(self, batch_size: int, visible: Tensor | None) -> Canvas | None:
        """Without any value yet, of models that know any order."""
        if self.order == "any":
            return Canvas.empty(self.raster, batch_size, visible, self.device)
        if visible is not None:
            raise UserError(
                "this model knows the order of the raster only, so no other pixels can come first; "
                "train one with model.order=any."
            )
        return None

    def condition(
        self,
        labels: Int64[Tensor, " b"] | None,
        orientation: Int64[Tensor, " b"] | None,
        place: Int64[Tensor, "#b n"],
    ) -> Float[Tensor, "#b n_or_1 e"] | None:
        """What label and orientation add to the input of steps, or the same of all steps.

        None for models that know of neither.

        Args:
            labels: see `log_prob`; models that know labels need them.
            orientation: see `log_prob`.
            place: the steps, in the raster.
        """
        condition = None
        if self.label is not None and labels is not None:
            condition = self.label(labels, place, orientation if self.turns_areas else None)
        if self.flip is not None:
            if orientation is None:
                orientation = torch.zeros(1, dtype=torch.int64, device=self.device)
            turned = self.flip(orientation).unsqueeze(1)
            condition = turned if condition is None else condition + turned
        return condition

    def _inputs(
        self,
        seen: Tensor | Canvas,
        step: Tensor,
        labels: Tensor | None,
        orientation: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The input of the blocks, "b n e", and the linear prediction of the values, "b n s"."""
        x, numbers = self.embedding(seen, step)
        predicted = None if self.prediction is None else self.prediction(numbers)
        place = seen.places(step) if isinstance(seen, Canvas) else step.unsqueeze(0)
        condition = self.condition(labels, orientation, place)
        return self.dropout(x if condition is None else x + condition), predicted

    def _parallel(
        self,
        seen: Tensor | Canvas,
        step: Tensor,
        states: list[AttentionState] | None,
        labels: Tensor | None,
        orientation: Tensor | None = None,
    ) -> tuple[Tensor, list[AttentionState]]:
        x, predicted = self._inputs(seen, step, labels, orientation)
        layers = []
        for index, block in enumerate(self._blocks()):
            x, layer = block(x, states[index] if states else None)
            layers.append(layer)
        return self.head(self.norm(x), predicted), layers


OPTION_GROUPS: dict[str, type] = {
    "block": BlockOptions,
    "sequence": SequenceOptions,
    "condition": ConditionOptions,
}
"""The arguments of `ImageTransformer` that are made of options of their own."""


def known_options() -> dict[str, inspect.Parameter]:
    """The arguments of `ImageTransformer.from_options` but for the spec, by name."""
    kinds = (ImageTransformer, *OPTION_GROUPS.values())
    every = {name: p for kind in kinds for name, p in inspect.signature(kind).parameters.items()}
    return {name: p for name, p in every.items() if name not in ("spec", *OPTION_GROUPS)}


def default_options() -> dict[str, Any]:
    """The options of a model that need not be given, and what they are then."""
    return {name: p.default for name, p in known_options().items() if p.default is not p.empty}
