"""Linear attention as its papers write it, one position at a time.

The maps that stand for a kernel are given here by that kernel of the queries and keys themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from imagegen.attention.feature_maps import Favor, Fourier, FunctionMap, Learned
from imagegen.attention.linear import LinearAttention
from tests.reference import over_heads

Kernel = Callable[[Tensor, Tensor], Tensor]
"""The weights "j" of all keys "j d" for one query "d"."""


def phi(name: str, x: Tensor) -> Tensor:
    """Feature maps, as written."""
    if name == "elu":
        return torch.where(x > 0, x + 1, x.exp())
    return torch.where(x > 0, x, 0 * x)


def function_kernel(name: str) -> Kernel:
    """The kernels of the maps without a state; s = q^T k / sqrt(d)."""

    def kernel(q: Tensor, k: Tensor) -> Tensor:
        s = k @ q / len(q) ** 0.5
        if name == "polynomial2":
            return s**2
        if name == "taylor2":
            return 1 + s + s**2 / 2
        return phi(name, k) @ phi(name, q)

    return kernel


def favor_features(omega: Tensor, x: Tensor) -> Tensor:
    """Choromanski et al. (2021), eq. 5 and 7, of "j d" with "f d" draws."""
    x = x / x.shape[-1] ** 0.25
    norm = (x**2).sum(dim=-1, keepdim=True)
    return torch.exp(-norm / 2) / len(omega) ** 0.5 * torch.exp(x @ omega.T)


def fourier_kernel(omega: Tensor) -> Kernel:
    """Peng et al. (2021): by the addition theorem, a mean of cosines."""

    def kernel(q: Tensor, k: Tensor) -> Tensor:
        q, k = q / q.norm(), k / k.norm(dim=-1, keepdim=True)
        return torch.cos((q - k) @ omega.T).mean(dim=-1)

    return kernel


def hedgehog(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """Zhang et al. (2024): the exponentials of W x + b and of its negation, each of sum 1."""
    x = x @ weight.T + bias
    up, down = torch.exp(x), torch.exp(-x)
    return torch.cat([up / up.sum(-1, keepdim=True), down / down.sum(-1, keepdim=True)], dim=-1)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, normalized: Callable[..., Tensor]
) -> Tensor:
    """Katharopoulos et al. (2020), eq. 5 and 8: weighted means of the values up to each one."""
    rows = []
    for i in range(len(q)):
        weights = kernel(q[i], k[: i + 1])
        rows.append(weights @ v[: i + 1] / normalized(weights.sum(), q[i], k[: i + 1]))
    return torch.stack(rows)


def reference(module: LinearAttention, x: Tensor) -> Tensor:
    """The output of `module`, literally."""
    heads = itertools.cycle(range(module.n_heads))
    feature_map = module.feature_map

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h = next(heads)

        def normalized(total: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return total + module.eps

        if isinstance(feature_map, FunctionMap):
            kernel = function_kernel(feature_map.function.__name__)
        elif isinstance(feature_map, Favor):
            omega = feature_map.omega[h]

            def kernel(q: Tensor, k: Tensor) -> Tensor:
                return favor_features(omega, k) @ favor_features(omega, q)

            def normalized(total: Tensor, q: Tensor, k: Tensor) -> Tensor:
                # eps is in units of the largest features, which count as constants.
                unit = favor_features(omega, q).max() * favor_features(omega, k).max()
                return total + module.eps * unit.detach()

        elif isinstance(feature_map, Fourier):
            kernel = fourier_kernel(feature_map.sigma[h] * feature_map.omega[h])

            def normalized(total: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return torch.clamp(total, min=0.1)

        else:
            assert isinstance(feature_map, Learned)

            def kernel(q: Tensor, k: Tensor) -> Tensor:
                key = feature_map.key_weight[h], feature_map.key_bias[h, 0]
                query = feature_map.query_weight[h], feature_map.query_bias[h, 0]
                return hedgehog(*key, k) @ hedgehog(*query, q)

        return linear_attention(q, k, v, kernel, normalized)

    return over_heads(module, x, head)
