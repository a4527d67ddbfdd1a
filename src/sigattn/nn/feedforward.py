"""Feed-forward layers."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.shapes import Float


class SwiGLU(nn.Module):
    """``W₃ (silu(W₁ x) ∘ W₂ x)`` (Shazeer, 2020), without biases.

    Args:
        width: features of the input and the output.
        hidden: features in between.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_and_value = nn.Linear(width, 2 * hidden, bias=False)
        self.output = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Apply to each position by itself."""
        gate, value = self.gate_and_value(x).chunk(2, dim=-1)
        result: Tensor = self.output(F.silu(gate) * value)
        return result


class MLP(nn.Module):
    """``W₂ gelu(W₁ x)``, with biases: what vision and speech transformers have.

    Args:
        width: features of the input and the output.
        hidden: features in between.
        dropout: after each of the two layers, while training.
    """

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Apply to each position by itself."""
        result: Tensor = self.dropout(self.output(self.dropout(F.gelu(self.input(x)))))
        return result
