"""Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2025) and Kimi Delta Attention (Kimi Linear, 2025).

Axes: `b` batch, `n` position, `h` head, `a` decays of a head (1 or `d`, its key features),
`e` model width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.attention.delta import DeltaNet
from imagegen.core.errors import UserError

GATES = ("head", "channel")


class GatedDeltaNet(DeltaNet):
    """DeltaNet whose state also decays, by a number alpha in (0, 1) that depends on the input.

    `gate=head` is Gated DeltaNet, eq. 10, with the decay of Mamba-2 and an output gate by SiLU:

        S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T,   o_t = S_t q_t
        log alpha_t = -exp(A) softplus(W x_t + dt)                  A, dt: one per head
        y_t = W_o (RMSNorm(o_t) * SiLU(W_g x_t))

    `gate=channel` is Kimi Delta Attention, eq. 1 and 10, a decay for every feature of the key; the
    projections of both gates have the rank of a head, and the output gate is a sigmoid:

        S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t
        log alpha_t = -exp(A) softplus(W'' W' x_t + dt)             A per head, dt per feature
        y_t = W_o (RMSNorm(o_t) * sigmoid(W_g'' W_g' x_t))

    Args:
        gate: `head` or `channel`.
        expand_v: value features of a head, as a multiple of head_dim; by default as in the papers,
            2 for `head` and 1 for `channel`.
        output_gate: whether the outputs are gated.
        context: see `DeltaNet`.

    Raises:
        UserError: for an unknown gate, and as `DeltaNet`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        *,
        gate: str = "head",
        expand_v: float | None = None,
        output_gate: bool = True,
        **context: Any,
    ) -> None:
        if gate not in GATES:
            raise UserError(f"attention.gate={gate} is unknown; choose one of {', '.join(GATES)}.")
        if expand_v is None:
            expand_v = 2.0 if gate == "head" else 1.0
        super().__init__(
            d_model, n_heads, head_dim, expand_v=expand_v, output_gate=output_gate, **context
        )
        if gate == "channel":
            decays = self.n_heads * self.head_dim
            self.decay: nn.Module = self._low_rank(decays)
            if output_gate:
                self.output_gate = self._low_rank(self.n_heads * self.value_dim)
            self.gate_activation = torch.sigmoid
        else:
            decays = self.n_heads
            self.decay = nn.Linear(d_model, decays, bias=False)
        # As Mamba-2 starts: rates of 1 to 16, steps of 0.001 to 0.1 after the softplus.
        self.log_rate = nn.Parameter(torch.empty(self.n_heads).uniform_(1, 16).log())
        step = torch.empty(decays).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.step_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def _low_rank(self, features: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.d_model, self.head_dim, bias=False),
            nn.Linear(self.head_dim, features, bias=False),
        )

    def _log_decay(self, x: Float[Tensor, "*b e"]) -> Float[Tensor, "*b h a"]:
        raw = self._precise(self.decay(x))
        with torch.autocast(x.device.type, enabled=False):
            step = F.softplus(raw + self.step_bias.to(raw.dtype))
            step = rearrange(step, "... (h a) -> ... h a", h=self.n_heads)
            return -self.log_rate.to(raw.dtype).exp().unsqueeze(-1) * step
