"""The model that is measured: its sizes from `conf/`, its weights random, and what it costs.

Axes: `b` batch, `n` position, `h` head, `d` query/key/value feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from imagegen.commands.benchmark.contestants import choose_mechanisms
from imagegen.core.errors import UserError

if TYPE_CHECKING:
    from imagegen.model.transformer import ImageTransformer
else:  # Annotations are checked in tests; torch is not to be imported for them.
    ImageTransformer = Any

FLOAT = 4
"""Bytes of a float32."""
_PAPER = {"d_model": 256, "n_heads": 8, "head_dim": 32, "d_ff": 1024, "tokens": "subpixel"}
_PAPER_MODELS: dict[tuple[tuple[int, ...], int], str] = {
    ((28, 28, 1), 8): "mnist",
    ((32, 32, 3), 16): "cifar10",
}
"""By the images' shape and the number of layers."""


@dataclass(frozen=True)
class Setting:
    """A model of some images; plain values, because it is sent to other processes.

    Attributes:
        spec: of the images.
        model: arguments of `ImageTransformer` but for `spec` and `attention`.
        seed: of the weights and of what the model is given.
    """

    spec: dict[str, int]
    model: dict[str, Any]
    seed: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], seed: int) -> Setting:
        """From the groups `dataset`, `model` and `head`; no data are read.

        Raises:
            UserError: for a data set or a model that cannot be.
        """
        from imagegen.core.build import build
        from imagegen.data.base import ImageDataset

        options = dict(config["model"])
        if options.pop("conditional"):
            raise UserError(
                "model.conditional=true is not measured, because labels change neither time nor "
                "memory; leave it out."
            )
        spec = build(config["dataset"], ImageDataset).spec
        return cls(spec.to_dict(), {**options, "head": config["head"]}, seed)

    def build(self, attention: str) -> ImageTransformer:
        """The model with `linear` or `softmax` attention, not training, on the CPU.

        Raises:
            UserError: for sizes that make no model.
        """
        import torch

        from imagegen.core.spec import ImageSpec
        from imagegen.model.transformer import ImageTransformer

        (mechanism,) = choose_mechanisms(attention)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed % 2**63)
            spec = ImageSpec.from_dict(self.spec)
            return ImageTransformer.from_options(
                spec, attention=mechanism.config, **self.model
            ).eval()

    @property
    def head_dim(self) -> int:
        """Features `d` of a head."""
        return self.model["head_dim"] or self.model["d_model"] // self.model["n_heads"]

    @property
    def paper(self) -> str | None:
        """The data set for which this is the model of Katharopoulos et al. (2020)."""
        shape = tuple(self.spec[name] for name in ("height", "width", "channels"))
        alike = all(self.model[key] == value for key, value in _PAPER.items())
        name = _PAPER_MODELS.get((shape, self.model["n_layers"]))
        return name if alike else None

    def describe(self) -> dict[str, Any]:
        """What a result says of it."""
        return {"images": self.spec, **self.model, "head_dim": self.head_dim, "dtype": "float32"}

    def sentence(self) -> str:
        """Its sizes in words, without a full stop."""
        spec, model = self.spec, self.model
        layers = "1 layer" if model["n_layers"] == 1 else f"{model['n_layers']} layers"
        return (
            f"{layers}, d_model={model['d_model']}, {model['n_heads']} heads of "
            f"{self.head_dim}, d_ff={model['d_ff']}, images of {spec['height']}×{spec['width']}×"
            f"{spec['channels']}, tokens={model['tokens']}"
        )


@dataclass(frozen=True)
class Costs:
    """What one model needs by its equations, whoever computes them.

    Attributes:
        length: steps `n` of an image.
        weights: numbers in the matrices that every step multiplies with.
        layers, heads, features: `h` and `d` of each layer.
    """

    length: int
    weights: int
    layers: int
    heads: int
    features: int

    @classmethod
    def of(cls, model: ImageTransformer) -> Costs:
        """Count them."""
        from torch import nn

        from imagegen.model.block import Block

        attention = [cast(Block, block).attention for block in model.blocks]
        return cls(
            model.raster.length,
            sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)),
            len(attention),
            attention[0].n_heads,
            attention[0].head_dim,
        )

    def state_bytes(self, attention: str) -> int:
        """Of the attention states of one image behind its last step, in float32.

        Linear: S "h d d" and z "h d" a layer; softmax: keys and values "h n d" a layer.
        """
        kept = 2 * self.length if attention == "softmax" else self.features + 1
        return FLOAT * self.layers * self.heads * self.features * kept

    def flops_an_image(self, attention: str) -> float:
        """Additions and multiplications of all steps, none of them computed twice.

        A weight takes two. Linear attention takes two for each entry of S to update it and two to
        read it; softmax takes four for each feature of a position that it looks back at.
        """
        looked_at = (self.length + 1) / 2 if attention == "softmax" else self.features
        of_attention = 4 * self.layers * self.heads * self.features * looked_at
        return self.length * (2 * self.weights + of_attention)

    def bytes_an_image(self, attention: str, batch_size: int) -> float:
        """Memory read and written by all steps, if weights and states came from there at each.

        Weights, as float32, are read once for a batch. S and z are read and written; of the keys
        and values half are read on average.
        """
        share = 0.5 if attention == "softmax" else 2.0
        state = share * self.state_bytes(attention)
        return self.length * (FLOAT * self.weights / batch_size + state)
