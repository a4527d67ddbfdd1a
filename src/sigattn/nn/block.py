"""The transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from sigattn.nn.attention import Activation, Attention
from sigattn.nn.feedforward import SwiGLU
from sigattn.shapes import Float


class Block(nn.Module):
    """Pre-norm: ``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``, with RMSNorm.

    Args:
        width, heads, activation, bias, qk_norm: as in ``Attention``.
        hidden: the feed-forward layer's features.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, activation: Activation, bias: float | None, qk_norm: bool = True
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, activation=activation, bias=bias, qk_norm=qk_norm)
        self.feed_forward_norm = nn.RMSNorm(width, eps=1e-5)
        self.feed_forward = SwiGLU(width, hidden)

    def forward(self, x: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        """One layer."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))
