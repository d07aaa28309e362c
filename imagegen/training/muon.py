"""Muon: momentum whose update of a weight matrix is made orthogonal.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. PyTorch's own
Muon multiplies in bfloat16, which processors without such instructions do hundreds of times slower,
and leaves everything but matrices to a second optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.adamw import adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration, chosen there so that small singular values grow fastest."""


def orthogonalized(
    matrix: Float[Tensor, "rows columns"], iterations: int = 5
) -> Float[Tensor, "rows columns"]:
    """Roughly U V^T of the singular value decomposition U S V^T, by Newton and Schulz's iteration.

    The singular values of the result are between about 0.7 and 1.2, but for those below a
    thousandth of the largest.
    """
    a, b, c = COEFFICIENTS
    x = matrix / (torch.linalg.matrix_norm(matrix) + 1e-7)
    wide = x.shape[0] <= x.shape[1]
    if not wide:
        x = x.mT
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Muon for the weight matrices of the blocks, Adam for everything else.

    A matrix of shape rows x columns moves by lr sqrt(max(1, rows / columns)) along its
    orthogonalized Nesterov momentum; embeddings, the output layer, norms and biases are left to
    PyTorch's AdamW. Weights of both kinds decay by their rate times weight_decay in each step.

    Args:
        named_parameters: names and parameters of an `ImageTransformer`.
        lr: of the matrices.
        momentum: of the matrices.
        adam_lr, betas, eps: of the rest.
        weight_decay: of all.

    Raises:
        ValueError: for a rate, a decay or an eps below 0, and momenta outside of 0 to 1.
    """

    wants_names = True

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float = 0.02,
        momentum: float = 0.95,
        adam_lr: float = 0.002,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        for name, value in {
            "lr": lr,
            "adam_lr": adam_lr,
            "eps": eps,
            "weight_decay": weight_decay,
        }.items():
            if not value >= 0:
                raise ValueError(f"{name}={value} must be at least 0")
        for name, value in {
            "momentum": momentum,
            "betas[0]": betas[0],
            "betas[1]": betas[1],
        }.items():
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value} must be at least 0 and below 1")
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in named_parameters:
            hidden = name.startswith("blocks.") and parameter.ndim == 2
            (matrices if hidden else rest).append(parameter)
        groups = [
            {"params": matrices, "lr": lr, "momentum": momentum, "matrices": True},
            {"params": rest, "lr": adam_lr, "betas": tuple(betas), "eps": eps, "matrices": False},
        ]
        super().__init__(
            [group for group in groups if group["params"]], {"weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the loss that the closure returns, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["matrices"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._move(parameter, parameter.grad, group)
            else:
                self._adam(group)
        return loss

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        average = state["momentum"].lerp_(gradient, 1 - group["momentum"])
        direction = orthogonalized(gradient.lerp(average, group["momentum"]))
        rows, columns = parameter.shape
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)

    def _adam(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        for p in parameters:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros(())
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        states = [self.state[p] for p in parameters]
        adamw(
            parameters,
            [p.grad for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
