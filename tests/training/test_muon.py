"""Muon against what its authors write, and against PyTorch's AdamW."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from imagegen.training.muon import COEFFICIENTS, Muon, orthogonalized
from imagegen.training.optimizers import build_optimizer


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 4), nn.Linear(4, 6)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        result: torch.Tensor = self.head(x)
        return result


def _model() -> _Model:
    torch.manual_seed(0)
    return _Model().double()


def _descend(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, dtype=torch.float64, generator=rng)
    y = torch.randn(8, 3, dtype=torch.float64, generator=rng)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("shape", [(16, 16), (12, 40), (40, 12), (1, 7)])
def test_orthogonalized_keeps_the_singular_vectors(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    size = min(shape)
    u = np.linalg.qr(rng.normal(size=(shape[0], size)))[0]
    v = np.linalg.qr(rng.normal(size=(shape[1], size)))[0]
    values = np.geomspace(1, 0.02, size)
    found = orthogonalized(torch.from_numpy(u * values @ v.T)).numpy()
    inner = u.T @ found @ v
    assert np.abs(inner - np.diag(np.diag(inner))).max() < 1e-9
    assert np.diag(inner).min() > 0.6
    assert np.diag(inner).max() < 1.25
    # The polynomial applied to the singular values, one by one.
    a, b, c = COEFFICIENTS
    x = values / np.linalg.norm(values)
    for _ in range(5):
        x = a * x + b * x**3 + c * x**5
    np.testing.assert_allclose(np.diag(inner), x, rtol=1e-5)


def test_matrices_move_as_the_paper_says_and_the_rest_as_under_adamw() -> None:
    ours, theirs = _model(), _model()
    options: dict[str, Any] = {"betas": (0.8, 0.9), "weight_decay": 0.1}
    optimizer = Muon(ours.named_parameters(), lr=0.05, momentum=0.9, adam_lr=0.01, **options)
    matrices = [block.weight for block in theirs.blocks]  # type: ignore[union-attr]
    rest = [p for name, p in theirs.named_parameters() if p.ndim == 1 or "head" in name]
    adam = torch.optim.AdamW(rest, lr=0.01, **options)
    momenta = [torch.zeros_like(p) for p in matrices]
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, dtype=torch.float64, generator=rng)
    y = torch.randn(8, 3, dtype=torch.float64, generator=rng)
    _descend(ours, optimizer)
    for _ in range(5):
        theirs.zero_grad()
        (theirs(x) - y).square().mean().backward()
        adam.step()
        with torch.no_grad():
            for p, m in zip(matrices, momenta, strict=True):
                assert p.grad is not None
                m.copy_(0.9 * m + 0.1 * p.grad)
                update = orthogonalized(0.1 * p.grad + 0.9 * m)
                scale = max(1, p.shape[0] / p.shape[1]) ** 0.5
                p.copy_(p - 0.05 * 0.1 * p - 0.05 * scale * update)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_goes_on_from_its_state() -> None:
    model, other = _model(), _model()
    optimizer = Muon(model.named_parameters())
    _descend(model, optimizer, 3)
    other.load_state_dict(model.state_dict())
    resumed = Muon(other.named_parameters(), lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert _descend(model, optimizer) == _descend(other, resumed)


def test_names_are_given_to_those_that_want_them() -> None:
    model = _model()
    muon = build_optimizer(Muon, model)
    assert [len(group["params"]) for group in muon.param_groups] == [2, 4]
    assert len(build_optimizer(torch.optim.AdamW, model).param_groups) == 1
    assert len(build_optimizer(Muon, nn.Linear(2, 2)).param_groups) == 1


@pytest.mark.parametrize(
    "option", [{"lr": -1.0}, {"adam_lr": float("nan")}, {"momentum": 1.0}, {"betas": (0.9, 1.0)}]
)
def test_impossible_settings_are_refused(option: dict[str, Any]) -> None:
    name = next(iter(option))
    with pytest.raises(ValueError, match=rf"^{name}.* must be at least 0"):
        Muon(_model().named_parameters(), **option)


def test_closures_are_called() -> None:
    model = _model()
    before = [p.clone() for p in model.parameters()]

    def closure() -> torch.Tensor:
        loss = model(torch.ones(2, 6, dtype=torch.float64)).square().mean()
        loss.backward()
        return loss

    assert Muon(model.named_parameters()).step(closure) > 0
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
