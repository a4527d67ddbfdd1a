"""Positional encodings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sigattn.shapes import Float


class RotaryEmbedding(nn.Module):
    """RoPE: turn each pair of a head's features by an angle that grows with the position (Su et al., 2021).

    Features i and i + head_dim / 2 make a pair (the layout of Llama), turned by position · base^(-2i / head_dim).

    Args:
        head_dim: an even number of features per head.
        base: the largest wavelength is 2π · base positions.

    Raises:
        ValueError: if head_dim is odd.
    """

    frequencies: Tensor

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"RotaryEmbedding turns pairs of features, so head_dim must be even, got {head_dim}")
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("frequencies", base**-exponents, persistent=False)

    def forward(
        self, x: Float[Tensor, "batch heads length head_dim"], first_position: int = 0
    ) -> Float[Tensor, "batch heads length head_dim"]:
        """Turn queries or keys at positions first_position, first_position + 1, … in x's dtype."""
        positions = torch.arange(first_position, first_position + x.shape[2], device=x.device, dtype=torch.float32)
        angles = positions[:, None] * self.frequencies  # (length, head_dim / 2)
        cos, sin = angles.cos(), angles.sin()
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
