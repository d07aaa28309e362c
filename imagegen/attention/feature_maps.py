"""Feature maps phi for linear attention, whose scores are phi(q)^T phi(k).

Axes: `b` batch, `h` head, `n` position, `d` query/key feature before the map, `f` after it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from imagegen.core.errors import UserError
from imagegen.core.float64 import float64_device

Keys = tuple[Float[Tensor, "b h n f"], Float[Tensor, "b h n"] | None]


def elu(x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    """elu(x) + 1 (Katharopoulos et al., 2020, eq. 7): x + 1 where x > 0, else exp(x).

    Written without the cancellation of (exp(x) - 1) + 1, which loses strongly negative inputs in
    low precision, and so that neither part can overflow under the other's gradient.
    """
    return _Elu.apply(x)


class _Elu(torch.autograd.Function):
    """`elu`, which keeps its output alone: the derivative is min(elu(x), 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = torch.relu(x)
        y = (x - positive).exp_().add_(positive)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y.clamp(max=1).mul_(gradient)


def relu(x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    """max(x, 0) (Choromanski et al., 2021, section 4)."""
    return torch.relu(x)


def polynomial2(x: Float[Tensor, "... d"]) -> Float[Tensor, "... f"]:
    """The polynomial kernel of degree two, (q^T k / sqrt(d))^2, exactly, by d (d + 1) / 2 features.

    Katharopoulos et al. (2020), section 3.2.1, name it; the temperature is that of the softmax.
    """
    return _squares(x * x.shape[-1] ** -0.25)


def taylor2(x: Float[Tensor, "... d"]) -> Float[Tensor, "... f"]:
    """BASED (Arora et al., 2024, eq. 4): exp(s) as 1 + s + s^2 / 2 with s = q^T k / sqrt(d).

    It has 1 + d + d (d + 1) / 2 features, the paper's 1 + d + d^2 with equal products joined, and
    is at least 1/2. The paper keeps d small, at 16.
    """
    x = x * x.shape[-1] ** -0.25
    return torch.cat([torch.ones_like(x[..., :1]), x, _squares(x) * 0.5**0.5], dim=-1)


def _squares(x: Tensor) -> Tensor:
    """Features of (x^T y)^2: x_i^2, and sqrt(2) x_i x_j for i < j."""
    twice = x * 2**0.5
    products = [twice[..., i : i + 1] * x[..., i + 1 :] for i in range(x.shape[-1] - 1)]
    return torch.cat([x.square(), *products], dim=-1)


class FeatureMap(nn.Module, ABC):
    """Maps the queries and keys of all heads.

    Attributes:
        feature_dim: number of features `f`.
        floor: the least value of the normaliser, for maps whose scores may be negative.
        scaled: whether the keys' features come with a scale.
    """

    floor: float | None = None
    scaled = False

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        self.feature_dim = feature_dim

    @abstractmethod
    def queries(self, q: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n f"]:
        """phi(q), where a query's features may have any common factor: it cancels in the output."""

    @abstractmethod
    def keys(self, k: Float[Tensor, "b h n d"]) -> Keys:
        """phi(k), and the logarithm of the factor that is left out of each key's features."""


class FunctionMap(FeatureMap):
    """A function of one vector, the same for queries, keys and heads; it has no state."""

    def __init__(self, function: Callable[[Tensor], Tensor], head_dim: int) -> None:
        super().__init__(function(torch.zeros(head_dim)).shape[-1])
        self.function = function

    def queries(self, q: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n f"]:
        return self.function(q)

    def keys(self, k: Float[Tensor, "b h n d"]) -> Keys:
        return self.function(k), None


class Favor(FeatureMap):
    """Positive orthogonal random features of exp(q^T k / sqrt(d)) (Choromanski et al., 2021).

    phi(x) = exp(-|x|^2 / 2) / sqrt(f) (exp(w_1^T x), ..., exp(w_f^T x)) for x = q or k over
    d^(1/4) (eq. 5 and 7), where the w are N(0, I), orthogonal in blocks of d.

    They are drawn once, for each head, and kept in the checkpoint. They are not drawn again during
    training, as the authors' code does in every call by default and performer-pytorch every 1,000
    steps, which keeps weights from adapting to one draw. So training is deterministic, and a model
    generates with the features that it was trained with; but it learns the kernel of its own draw,
    whose error does not average out: other features, or softmax itself, do not fit its weights.

    The paper's code keeps the exponentials in range by their largest value over the whole sequence,
    which is not causal. Here each vector gives its features relative to its largest one; for keys
    the logarithm of that is the scale, which the attention carries along.
    """

    scaled = True

    omega: Float[Tensor, "h f d"]

    def __init__(self, n_heads: int, head_dim: int, n_features: int | None = None) -> None:
        super().__init__(n_features or max(1, round(head_dim * math.log(head_dim))))
        self.register_buffer("omega", _orthogonal_normal(n_heads, self.feature_dim, head_dim))

    def log_features(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n f"]:
        """log phi(x)."""
        x = x * x.shape[-1] ** -0.25
        constant = x.square().sum(dim=-1, keepdim=True) / 2 + math.log(self.feature_dim) / 2
        return x @ self.omega.to(x.dtype).mT - constant

    def queries(self, q: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n f"]:
        return self._relative(q)[0]

    def keys(self, k: Float[Tensor, "b h n d"]) -> Keys:
        return self._relative(k)

    def _relative(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logarithms = self.log_features(x)
        # The scale cancels in the output, so nothing is lost by taking it for a constant.
        scale = logarithms.detach().amax(dim=-1)
        return (logarithms - scale.unsqueeze(-1)).exp(), scale


class Fourier(FeatureMap):
    """Random Fourier features of the Gaussian kernel on unit vectors (Peng et al., 2021, RFA).

    phi(x) = (sin w_1^T x, ..., sin w_D^T x, cos w_1^T x, ..., cos w_D^T x) / sqrt(D), the features
    of Rahimi and Recht (2007), for x = q / |q| or k / |k|, with w = sigma * w', w' drawn from
    N(0, I) once for each head and sigma learned, from 1, for each head and input feature. Its
    scores estimate exp(-|sigma * (x - y)|^2 / 2), which is exp(x^T y) up to a factor for sigma = 1.

    They may be negative, and so may the normaliser. As in the authors' code it is clamped from
    below; here at 0.1, a little less than exp(-2), the least that a single key adds for sigma = 1,
    so that it is left alone wherever the estimate is a good one. Below the floor the output is not
    a weighted mean, and the gradient knows only its numerator.
    """

    floor = 0.1

    omega: Float[Tensor, "h draws d"]

    def __init__(self, n_heads: int, head_dim: int, n_features: int | None = None) -> None:
        n_features = 2 * head_dim if n_features is None else n_features
        if n_features % 2:
            raise UserError(
                f"attention.n_features={n_features} must be even for attention.feature_map=fourier:"
                " each draw gives a sine and a cosine."
            )
        super().__init__(n_features)
        self.register_buffer("omega", torch.randn(n_heads, n_features // 2, head_dim))
        self.sigma = nn.Parameter(torch.ones(n_heads, 1, head_dim))

    def queries(self, q: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n f"]:
        projection = (self.sigma * self.omega).to(q.dtype)
        angles = F.normalize(q, dim=-1, eps=1e-6) @ projection.mT
        return torch.cat([angles.sin(), angles.cos()], dim=-1) * (self.feature_dim / 2) ** -0.5

    def keys(self, k: Float[Tensor, "b h n d"]) -> Keys:
        return self.queries(k), None


class Learned(FeatureMap):
    """A small trained map, (softmax(W x + b), softmax(-W x - b)) (Zhang et al., 2024, Hedgehog).

    Queries and keys of each head have their own W and b, which begin as the identity and 0. The
    softmax, over the features of one vector, replaces exp, whose sums could overflow. The map is
    trained with the model here, not towards the softmax attention of another one.
    """

    def __init__(self, n_heads: int, head_dim: int) -> None:
        super().__init__(2 * head_dim)
        identity = torch.eye(head_dim).repeat(n_heads, 1, 1)
        self.query_weight = nn.Parameter(identity)
        self.query_bias = nn.Parameter(torch.zeros(n_heads, 1, head_dim))
        self.key_weight = nn.Parameter(identity.clone())
        self.key_bias = nn.Parameter(torch.zeros(n_heads, 1, head_dim))

    def queries(self, q: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n f"]:
        return self._features(q, self.query_weight, self.query_bias)

    def keys(self, k: Float[Tensor, "b h n d"]) -> Keys:
        return self._features(k, self.key_weight, self.key_bias), None

    @staticmethod
    def _features(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = x @ weight.to(x.dtype).mT + bias.to(x.dtype)
        return torch.cat([x.softmax(dim=-1), (-x).softmax(dim=-1)], dim=-1)


def _orthogonal_normal(n_heads: int, n_features: int, head_dim: int) -> Tensor:
    """Vectors that are N(0, I) each and orthogonal in blocks of `head_dim`: "h f d"."""
    device = torch.get_default_device()
    if device.type == "meta":
        return torch.empty(n_heads, n_features, head_dim)
    blocks = math.ceil(n_features / head_dim)
    shape = (n_heads, blocks, head_dim, head_dim)
    square, triangle = torch.linalg.qr(
        torch.randn(shape, dtype=torch.float64, device=float64_device(device))
    )
    # Only with a positive diagonal is the rotation uniform, and each direction with it.
    square = square * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    directions = square.flatten(1, 2)
    lengths = torch.randn_like(directions).norm(dim=-1, keepdim=True)
    return (directions * lengths)[:, :n_features].to(torch.get_default_dtype()).to(device)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": elu,
    "relu": relu,
    "polynomial2": polynomial2,
    "taylor2": taylor2,
}
RANDOM: dict[str, type[Favor] | type[Fourier]] = {"favor": Favor, "fourier": Fourier}
FEATURE_MAPS = (*FUNCTIONS, *RANDOM, "learned")


def build_feature_map(
    name: str, n_heads: int, head_dim: int, n_features: int | None = None
) -> FeatureMap:
    """The feature map called `name`.

    Args:
        n_features: number of random features; by default d log d, rounded, for `favor` and 2 d for
            `fourier`. The other maps have a number of their own.

    Raises:
        UserError: for an unknown name, or a number of features that the map cannot have.
    """
    if name not in FEATURE_MAPS:
        raise UserError(
            f"attention.feature_map={name} is unknown; choose one of {', '.join(FEATURE_MAPS)}."
        )
    if name in RANDOM:
        if n_features is not None and n_features < 1:
            raise UserError(f"attention.n_features={n_features} must be at least 1.")
        return RANDOM[name](n_heads, head_dim, n_features)
    feature_map = (
        Learned(n_heads, head_dim) if name == "learned" else FunctionMap(FUNCTIONS[name], head_dim)
    )
    if n_features is not None:
        raise UserError(
            f"attention.n_features={n_features} is for {' and '.join(RANDOM)} only; leave it out: "
            f"attention.feature_map={name} has {feature_map.feature_dim} features here."
        )
    return feature_map
