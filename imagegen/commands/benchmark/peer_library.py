"""Models of pytorch-fast-transformers, the authors' library, as it is used for images.

Its encoders come from its builders, at the sizes of ours; around them lies what a user of it writes
and what it leaves to PyTorch: an embedding of the value before beside one of the position, a linear
layer, a draw from a mixture of logistics or its likelihood. Its blocks are post-norm whatever
`model.norm_first` says.

Axes: `b` batch, `n` position, `s` value per step, `k` component, `h` head, `d` feature.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from imagegen.commands.benchmark.setting import Setting
from imagegen.core.build import build
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.heads.base import OutputHead
from imagegen.heads.mixture_of_logistics import MIN_LOG_SCALE, MixtureOfLogistics
from imagegen.model.embeddings import Raster

INSTALL = (
    "pytorch-fast-transformers is not installed; CONTRIBUTING.md tells under Peers how to install "
    "it, in an environment of its own."
)
_RECURRENT = {"linear": "linear", "softmax": "full"}
_PARALLEL = {"linear": "causal-linear", "softmax": "full"}


def is_installed() -> bool:
    """Whether the library is found; it may still fail to load."""
    return importlib.util.find_spec("fast_transformers") is not None


class _Surroundings(nn.Module):
    """What lies around an encoder."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        spec, width = ImageSpec.from_dict(setting.spec), setting.model["d_model"]
        self.raster = Raster(spec, setting.model["tokens"])
        self.start = spec.levels
        self.value = nn.Embedding(spec.levels + 1, width // 2)
        self.place = nn.Parameter(torch.randn(self.raster.length, width - width // 2))
        self.head = build(
            setting.model["head"],
            OutputHead,
            d_model=width,
            levels=spec.levels,
            values_per_step=self.raster.values_per_step,
        )

    def embed(self, values: Tensor, place: Tensor) -> Tensor:
        """Of levels "... s" of the steps before, -1 for none, at their positions' embedding."""
        index = torch.where(values < 0, self.start, values)
        value = self.value(index).sum(dim=-2)
        return torch.cat([value, place.expand(*value.shape[:-1], -1)], dim=-1)


class PeerGenerator(_Surroundings):
    """Draws with the library's recurrent encoder.

    Args:
        attention: `linear` or `softmax` (a cache that grows by concatenation).

    Raises:
        UserError: for what the library has no counterpart of.
    """

    def __init__(self, setting: Setting, attention: str) -> None:
        super().__init__(setting)
        if not isinstance(self.head, MixtureOfLogistics):
            raise UserError("the peer draws from a mixture of logistics only")
        self.attention = attention
        self.encoder = _encoder("RecurrentEncoderBuilder", _RECURRENT[attention], setting, 0.0)
        self.heads, self.features = setting.model["n_heads"], setting.head_dim
        self.layers = setting.model["n_layers"]
        self.components = self.head.n_mixtures

    def filled_state(self, batch_size: int, position: int) -> list[list[Tensor]]:
        """States as they are behind `position` steps, of random content."""

        def random(*shape: int) -> Tensor:
            return torch.randn(batch_size, self.heads, *shape, device=self.place.device)

        d = self.features
        if self.attention == "softmax":
            return [[random(position, d), random(position, d)] for _ in range(self.layers)]
        return [[random(d, d), random(d).abs() + 1] for _ in range(self.layers)]

    def step(
        self, values: Int64[Tensor, "b s"], position: int, state: list[list[Tensor]] | None
    ) -> tuple[Int64[Tensor, "b s"], list[list[Tensor]]]:
        """Levels of the step at `position`, drawn, and the state behind it.

        Args:
            values: levels of the step before, -1 for the first step.
            state: None for the first step.
        """
        hidden, state = self.encoder(self.embed(values, self.place[position]), state)
        return self.sampled(self.head(hidden)), state

    def sampled(self, parameters: Float[Tensor, "b p"]) -> Int64[Tensor, "b s"]:
        """Levels drawn from the mixture, the channels of a pixel each by itself."""
        s, k = self.raster.values_per_step, self.components
        logits, means, log_scales = parameters[:, : (1 + 2 * s) * k].split([k, s * k, s * k], 1)
        chosen = torch.distributions.Categorical(logits=logits, validate_args=False).sample()
        chosen = chosen.view(-1, 1, 1).expand(-1, s, 1)
        mean, log_scale = (
            t.unflatten(1, (s, k)).gather(2, chosen).squeeze(2) for t in (means, log_scales)
        )
        u = torch.rand_like(mean).clamp(1e-6, 1 - 1e-6)
        x = mean + log_scale.clamp(min=MIN_LOG_SCALE).exp() * (u.log() - (1 - u).log())
        return ((x.clamp(-1, 1) + 1) * ((self.start - 1) / 2)).round().long()


class PeerTrainer(_Surroundings):
    """Learns with the library's encoder of all positions at once; our head scores.

    Args:
        attention: `linear` (its compiled causal product) or `softmax`.
        device: where it is to lie.
    """

    def __init__(self, setting: Setting, attention: str, device: str) -> None:
        super().__init__(setting)
        masking: Any = importlib.import_module("fast_transformers.masking")
        dropout = setting.model["dropout"]
        self.encoder = _encoder("TransformerEncoderBuilder", _PARALLEL[attention], setting, dropout)
        self.dropout = nn.Dropout(dropout)
        self.causal = masking.TriangularCausalMask(self.raster.length, device)
        self.masking = masking
        self.to(device)

    def loss(self, images: UInt8[Tensor, "b h w c"]) -> Float[Tensor, ""]:
        """Mean negative log-likelihood in nats per value."""
        sequence = self.raster.to_sequence(images)
        before = sequence[:, :-1].long()
        before = torch.cat([before.new_full((len(before), 1, before.shape[2]), -1), before], dim=1)
        n = before.shape[1]
        lengths = self.masking.LengthMask(before.new_full((len(before),), n), max_len=n)
        x = self.dropout(self.embed(before, self.place))
        hidden = self.encoder(x, attn_mask=self.causal, length_mask=lengths)
        return -self.head.log_prob(self.head(hidden), sequence).mean()


def _encoder(builder: str, kind: str, setting: Setting, dropout: float) -> Any:
    model, features = setting.model, setting.head_dim
    if features * model["n_heads"] != model["d_model"]:
        raise UserError("the peer needs a d_model of n_heads times head_dim")
    builders: Any = importlib.import_module("fast_transformers.builders")
    return (
        getattr(builders, builder)
        .from_kwargs(
            attention_type=kind,
            n_layers=model["n_layers"],
            n_heads=model["n_heads"],
            query_dimensions=features,
            value_dimensions=features,
            feed_forward_dimensions=model["d_ff"],
            activation=model["activation"],
            dropout=dropout,
            attention_dropout=0.0,
        )
        .get()
    )
