"""Biases of models that were converted from softmax attention: b predicts -log of a row's softmax denominator.

Softmax's weights are p = exp(s - lse), and a sigmoid with b = -lse gives p / (1 + p), which is nearly the same where no
key dominates. A conversion fits the parameters to -lse; in training they learn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sigattn.nn.bias import AttentionBias


class VisibleKeysLinearBias(AttentionBias):
    """Bias of c + a · log(visible keys), with a learned constant c and slope a for each head.

    It starts as -log of the visible keys: c = 0, a = -1.

    Args:
        num_heads: number of query heads.

    Attributes:
        constant: c, (num_heads,). slope: a, (num_heads,). Vectors, so that no optimiser decays them as a matrix.
    """

    needs_visible = True

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads: int = num_heads
        self.constant: nn.Parameter = nn.Parameter(torch.empty(num_heads))
        self.slope: nn.Parameter = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to -log of the visible keys."""
        nn.init.zeros_(self.constant)
        nn.init.constant_(self.slope, -1.0)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"num_heads={self.num_heads}"

    def forward(self, *_: Any, visible: Tensor | None = None, **__: Any) -> Tensor:
        """Return the bias, (B or 1, num_heads, N or 1, 1), in float32 or better.

        Raises:
            ValueError: if visible is None.
        """
        if visible is None:
            raise ValueError("VisibleKeysLinearBias depends on the number of keys that each query sees: pass visible")
        log_visible = visible.to(torch.promote_types(self.constant.dtype, torch.float32)).log()
        return self.constant.view(-1, 1, 1) + self.slope.view(-1, 1, 1) * log_visible


# the kinds that configurations name; each keeps its arguments, JSON values, as attributes of the same names
FITTED: dict[str, type[AttentionBias]] = {kind.__name__: kind for kind in (VisibleKeysLinearBias,)}
