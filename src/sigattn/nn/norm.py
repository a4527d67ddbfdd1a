"""What is put around a residual branch to keep it small: LayerScale, and dropping whole branches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sigattn.shapes import Float


class LayerScale(nn.Module):
    """A learned factor for each feature of a residual branch, small at first (Touvron et al., 2021).

    Args:
        width: features.
        initial: where the factors start: 1e-4 in the paper's vision and language models.
    """

    def __init__(self, width: int, initial: float = 1e-4) -> None:
        super().__init__()
        self.initial = initial
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to where they start."""
        nn.init.constant_(self.weight, self.initial)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Scale."""
        return x * self.weight


class StochasticDepth(nn.Module):
    """While training, drop a residual branch for whole samples, and scale it up for the others (Huang et al., 2016).

    Args:
        probability: of dropping, in [0, 1).

    Raises:
        ValueError: if the probability is out of range.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            raise ValueError(f"StochasticDepth: the probability must lie in [0, 1), got {probability}")
        self.probability = probability

    def forward(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
        """Zero for some samples, or unchanged when not training: (B, …)."""
        if not self.training or not self.probability:
            return x
        keep = torch.rand(len(x), *(1,) * (x.dim() - 1), device=x.device) >= self.probability
        return x * keep / (1 - self.probability)
