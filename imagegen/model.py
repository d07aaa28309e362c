"""The model: embeddings of what came before, causal attention blocks, a distribution a value.

Axes: `b` batch, `h w c` height, width, channel, `n` position, `s` values a step, `e` model width,
`p` parameters of the output distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from imagegen.attention.base import AttentionState, CausalAttention, Position
from imagegen.build import build
from imagegen.embedding import InputEmbedding
from imagegen.errors import UserError
from imagegen.heads.base import OutputHead
from imagegen.raster import Raster
from imagegen.spec import ImageSpec

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}


@dataclasses.dataclass
class ModelState:
    """What generation carries from one step to the next; it belongs to the caller.

    Attributes:
        position: number of steps whose distributions have been computed.
        recent: levels of the last steps, as many as the embedding looks back.
        layers: the attention states.
    """

    position: Position
    recent: UInt8[Tensor, "b lookback s"]
    layers: list[AttentionState]

    def tensors(self) -> list[Tensor]:
        """All tensors of the state."""
        return [self.recent, *(tensor for layer in self.layers for tensor in layer.tensors())]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the state holds."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def clone(self) -> ModelState:
        """A copy that shares no memory with this state."""
        layers = [layer.clone() for layer in self.layers]
        return ModelState(self.position, self.recent.clone(), layers)

    def repeat(self, times: int) -> ModelState:
        """Fork the state in new memory: image i becomes i * times to (i + 1) * times - 1."""
        layers = [layer.repeat(times) for layer in self.layers]
        return ModelState(self.position, self.recent.repeat_interleave(times, dim=0), layers)


class Block(nn.Module):
    """Attention and a feed-forward layer, each with its residual connection and LayerNorm.

    The norm precedes the layer inside the residual branch (`norm_first`), or follows the sum as in
    the paper's model.
    """

    def __init__(
        self,
        attention: CausalAttention[Any],
        d_model: int,
        d_ff: int,
        dropout: float,
        activation: str,
        norm_first: bool,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, d_ff),
            ACTIVATIONS[activation](),
            nn.Dropout(dropout),
            nn.Linear(d_ff, d_model),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "b n e"], state: AttentionState | None
    ) -> tuple[Float[Tensor, "b n e"], AttentionState]:
        """All positions at once, continuing from `state`."""
        y, state = self.attention(self.norm1(x) if self.norm_first else x, state)
        return self._residuals(x, y), state

    def step(
        self, x: Float[Tensor, "b e"], state: AttentionState
    ) -> tuple[Float[Tensor, "b e"], AttentionState]:
        """One position."""
        y, state = self.attention.step(self.norm1(x) if self.norm_first else x, state)
        return self._residuals(x, y), state

    def _residuals(self, x: Tensor, y: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.dropout(y)
            return x + self.dropout(self.feed_forward(self.norm2(x)))
        x = self.norm1(x + self.dropout(y))
        return self.norm2(x + self.dropout(self.feed_forward(x)))


class ImageTransformer(nn.Module):
    """An autoregressive transformer over the values of an image.

    It is trained with all positions in parallel (`parameters`, `log_prob`) and generates from a
    recurrent state (`prefill`, `step`); both forms share the weights and agree.

    Args:
        spec: size, channels and levels of the images.
        attention, head, embedding: plain dictionaries, a `_target_` of this package and options.
        n_layers, d_model, n_heads, head_dim, d_ff: sizes; head_dim is d_model / n_heads by default.
        dropout: share of activations zeroed in training.
        activation: `relu` or `gelu`, of the feed-forward layers.
        norm_first: whether a norm precedes each layer, or follows it as in the paper.

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
        d_model: int,
        n_heads: int,
        d_ff: int,
        head_dim: int | None = None,
        dropout: float = 0.0,
        activation: str = "gelu",
        norm_first: bool = True,
    ) -> None:
        super().__init__()
        for name, size in {"n_layers": n_layers, "d_model": d_model, "d_ff": d_ff}.items():
            if size < 1:
                raise UserError(f"model.{name}={size} must be at least 1.")
        if not 0 <= dropout < 1:
            raise UserError(f"model.dropout={dropout} must be at least 0 and below 1.")
        if activation not in ACTIVATIONS:
            raise UserError(
                f"model.activation={activation} is unknown; choose one of {', '.join(ACTIVATIONS)}."
            )
        self.spec = spec
        self.raster = Raster(spec)
        self.embedding = build(embedding, InputEmbedding, d_model=d_model, raster=self.raster)
        self.blocks = nn.ModuleList(
            Block(
                build(
                    attention,
                    CausalAttention,
                    d_model=d_model,
                    n_heads=n_heads,
                    head_dim=head_dim,
                    row_length=self.raster.row_length,
                    layer=layer,
                ),
                d_model=d_model,
                d_ff=d_ff,
                dropout=dropout,
                activation=activation,
                norm_first=norm_first,
            )
            for layer in range(n_layers)
        )
        self.norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.head = build(head, OutputHead, d_model=d_model, levels=spec.levels)

    def parameters_of(self, sequence: UInt8[Tensor, "b n s"]) -> Float[Tensor, "b n p"]:
        """Distributions of the first n steps, each given the values before it (teacher forcing)."""
        return self._parallel(self._padded(sequence[:, :-1]), 0, None)[0]

    def log_prob(self, images: UInt8[Tensor, "b h w c"]) -> Float[Tensor, "b n s"]:
        """Natural log-probability of every value of the images, in the order of the raster."""
        sequence = self.raster.to_sequence(images)
        return self.head.log_prob(self.parameters_of(sequence), sequence.squeeze(-1)).unsqueeze(-1)

    def bits_per_dim(self, images: UInt8[Tensor, "b h w c"]) -> Float[Tensor, "b"]:
        """Negative log2-likelihood of each image, divided by its number of dimensions."""
        nats = -self.log_prob(images).flatten(1).mean(dim=1)
        return nats / torch.log(nats.new_tensor(2.0))

    def initial_state(self, batch_size: int) -> ModelState:
        """The state before the first step."""
        device = self.norm.weight.device
        recent = torch.zeros(
            batch_size,
            self.embedding.lookback,
            self.raster.values_per_step,
            dtype=torch.uint8,
            device=device,
        )
        layers = [block.attention.initial_state(batch_size) for block in self._blocks()]
        return ModelState(0, recent, layers)

    def prefill(
        self, prefix: UInt8[Tensor, "b n s"], state: ModelState | None = None
    ) -> tuple[Float[Tensor, "b p"], ModelState]:
        """Take in a known part of the sequence through the parallel form.

        Args:
            prefix: values of the first n steps, or of the n steps that follow those of `state`.
            state: continue from here; the beginning by default.

        Returns:
            The distribution of the step after the prefix, and the state to go on from.
        """
        state = state or self.initial_state(prefix.shape[0])
        window = torch.cat([state.recent, prefix], dim=1)
        # The first step of all has no value before it, so its prediction is still to be made.
        skipped = 0 if state.position == 0 else 1
        parameters, layers = self._parallel(window[:, skipped:], state.position, state.layers)
        position = state.position + parameters.shape[1]
        recent = window[:, window.shape[1] - self.embedding.lookback :].clone()
        return parameters[:, -1], ModelState(position, recent, layers)

    def step(
        self, values: UInt8[Tensor, "b s"] | None, state: ModelState
    ) -> tuple[Float[Tensor, "b p"], ModelState]:
        """The distribution of the next step.

        Args:
            values: levels of the step before, whose distribution was computed last; None for the
                first step.
            state: carried from the step before; its memory may be reused.
        """
        recent = state.recent
        if values is not None:
            recent = torch.cat([recent[:, 1:], values.unsqueeze(1)], dim=1)
        x = self.dropout(self.embedding(recent, state.position)).squeeze(1)
        layers = []
        for block, layer in zip(self._blocks(), state.layers, strict=True):
            x, layer = block.step(x, layer)
            layers.append(layer)
        return self.head(self.norm(x)), ModelState(state.position + 1, recent, layers)

    def _blocks(self) -> Iterator[Block]:
        return cast(Iterator[Block], iter(self.blocks))

    def _padded(self, sequence: Tensor) -> Tensor:
        batch, _, values = sequence.shape
        return torch.cat(
            [sequence.new_zeros(batch, self.embedding.lookback, values), sequence], dim=1
        )

    def _parallel(
        self, window: Tensor, start: int, states: list[AttentionState] | None
    ) -> tuple[Tensor, list[AttentionState]]:
        x = self.dropout(self.embedding(window, start))
        layers = []
        for index, block in enumerate(self._blocks()):
            x, layer = block(x, states[index] if states else None)
            layers.append(layer)
        return self.head(self.norm(x)), layers
