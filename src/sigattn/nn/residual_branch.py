"""Layers at the end of a residual branch: LayerScale and stochastic depth."""

import torch
from torch import Tensor, nn

from sigattn.shapes import Float


class LayerScale(nn.Module):
    """Learned factor for each feature of a residual branch, small at first (Touvron et al., 2021).

    Args:
        dim: number of features. init_values: initial value of the factors; 1e-4 in the paper's vision and language.
    """

    def __init__(self, dim: int, init_values: float = 1e-4) -> None:
        super().__init__()
        self.init_values = init_values
        self.weight: nn.Parameter = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.init_values)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, init_values={self.init_values:g}"

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        return x * self.weight


class DropPath(nn.Module):
    """Drop a residual branch for random samples while training, and scale it up for the others (Huang et al., 2016).

    Args:
        drop_prob: probability of dropping, in [0, 1).
    """

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        if not 0 <= drop_prob < 1:
            raise ValueError(f"DropPath: drop_prob must lie in [0, 1), got {drop_prob}")
        self.drop_prob = drop_prob

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob:g}"

    def forward(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
        """Return x (B, …) with some samples set to zero while training, and unchanged in evaluation."""
        if not self.training or not self.drop_prob:
            return x
        keep = torch.rand(x.shape[0], *(1,) * (x.dim() - 1), device=x.device) >= self.drop_prob
        return x * keep / (1 - self.drop_prob)
