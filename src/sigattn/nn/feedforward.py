"""Feed-forward layers."""

from collections.abc import Callable
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.shapes import Float

FeedForward = Literal["swiglu", "gelu", "relu", "swish"]


def make_feed_forward(
    kind: FeedForward, embed_dim: int, mlp_dim: int, *, use_bias: bool = True, dropout: float = 0.0
) -> nn.Module:
    """Create a feed-forward layer: a ``SwiGLU``, or an ``MLP`` with "gelu", "relu" or "swish".

    Raises:
        ValueError: for another kind, or for "swiglu" with biases or dropout.
    """
    if kind == "swiglu":
        if use_bias or dropout:
            raise ValueError(f"SwiGLU supports neither biases nor dropout, got use_bias={use_bias}, dropout={dropout}")
        return SwiGLU(embed_dim, mlp_dim)
    return MLP(embed_dim, mlp_dim, dropout, activation=kind, use_bias=use_bias)


class SwiGLU(nn.Module):
    """``W₃ (silu(W₁ x) ∘ W₂ x)`` (Shazeer, 2020), without biases.

    Args:
        embed_dim: number of input and output features. mlp_dim: number of hidden features.
    """

    tp_plan: ClassVar[dict[str, str]] = {"gate": "columns", "value": "columns", "output": "rows"}  # see Attention

    def __init__(self, embed_dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.gate: nn.Linear = nn.Linear(embed_dim, mlp_dim, bias=False)
        self.value: nn.Linear = nn.Linear(embed_dim, mlp_dim, bias=False)
        self.output: nn.Linear = nn.Linear(mlp_dim, embed_dim, bias=False)

    def forward(self, x: Float[Tensor, "*batch embed_dim"]) -> Float[Tensor, "*batch embed_dim"]:
        return self.output(F.silu(self.gate(x)) * self.value(x))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swish": F.silu}


class MLP(nn.Module):
    """``W₂ f(W₁ x)``, the feed-forward layer of vision and speech transformers (GELU) and of conformers (swish).

    Args:
        embed_dim: number of input and output features. mlp_dim: number of hidden features.
        dropout: dropout probability after each of the two linear layers, while training.
        activation: f, "gelu", "relu" or "swish".
        use_bias: True for biases in the linear layers.

    Raises:
        ValueError: for another activation.
    """

    tp_plan: ClassVar[dict[str, str]] = {"input": "columns", "output": "rows"}  # see Attention

    def __init__(
        self, embed_dim: int, mlp_dim: int, dropout: float = 0.0, *, activation: str = "gelu", use_bias: bool = True
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"MLP: activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
        self.input: nn.Linear = nn.Linear(embed_dim, mlp_dim, bias=use_bias)
        self.output: nn.Linear = nn.Linear(mlp_dim, embed_dim, bias=use_bias)
        self.activation = activation
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"

    def forward(self, x: Float[Tensor, "*batch embed_dim"]) -> Float[Tensor, "*batch embed_dim"]:
        hidden = self.dropout(_ACTIVATIONS[self.activation](self.input(x)))
        return self.dropout(self.output(hidden))
