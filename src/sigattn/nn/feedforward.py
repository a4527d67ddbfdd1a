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
