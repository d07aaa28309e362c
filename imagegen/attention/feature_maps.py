"""Feature maps phi for linear attention, applied to queries and keys of shape "... d"."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from imagegen.errors import UserError


def elu(x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    """elu(x) + 1 (Katharopoulos et al., 2020, eq. 7): x + 1 where x > 0, else exp(x).

    Written without the cancellation of (exp(x) - 1) + 1, which loses strongly negative inputs in
    low precision, and so that neither part can overflow under the other's gradient.
    """
    positive = torch.relu(x)
    return positive + (x - positive).exp()


def relu(x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    """max(x, 0) (Choromanski et al., 2021, section 4)."""
    return torch.relu(x)


FEATURE_MAPS = {"elu": elu, "relu": relu}


def feature_map_named(name: str) -> Callable[[Tensor], Tensor]:
    """The feature map called `name`.

    Raises:
        UserError: for an unknown name.
    """
    if name not in FEATURE_MAPS:
        raise UserError(
            f"attention.feature_map={name} is unknown; choose one of {', '.join(FEATURE_MAPS)}."
        )
    return FEATURE_MAPS[name]
