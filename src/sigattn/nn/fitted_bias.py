"""Biases that predict -log of a row's softmax denominator, lse: from the visible keys, or from the query, too.

Softmax's weights are p = exp(s - lse), and a sigmoid with b = -lse - m, times e^m, gives p / (1 + p e^-m), which is
nearly the same. ``sigattn.convert`` fits ``VisibleKeysLinearBias`` to -lse - m, and the sum of a row takes the place of
e^m (``sigattn.conversion.fit``); in training the parameters learn.

For a query q and normally distributed keys with mean μ and covariance Σ, lse is log n + τ q·μ + τ² qᵀΣq / 2 (τ: the
scale), up to sampling: the log of a mean of exp(τ q·k) is its cumulant generating function. ``QuadraticBias`` has this
form, with free coefficients. Where b misses -lse - m by δ, the output is too large by about e^δ. ``RowScale`` has the
factor e^m, and corrects each row from its norm and direction: a large norm is partly a sign of a large δ.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from sigattn.nn.bias import AttentionBias
from sigattn.ops.settings import without_autocast

EPS = 1e-6  # added to the norm of an output's row
MAX_LOG_SCALE = 5.0  # bound of |log scale|, e⁵ ≈ 150
MAX_DIRECTIONS = 8  # of a quadratic form; with 24 models are hardly better (docs/log.md), and slower


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
        nn.init.zeros_(self.constant)
        nn.init.constant_(self.slope, -1.0)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"

    def forward(self, *_: Any, visible: int | Tensor | None = None, **__: Any) -> Tensor:
        """Return the bias for ``visible``, which must be given: (B or 1, num_heads, N or 1, 1), at least float32."""
        if visible is None:
            raise ValueError(f"{type(self).__name__} depends on the keys that each query sees: pass visible")
        wide = torch.promote_types(self.constant.dtype, torch.float32)
        constant, slope = self.constant.to(wide), self.slope.to(wide)
        if not isinstance(visible, Tensor):  # one operator: calls of few tokens are short
            return torch.add(constant, slope, alpha=math.log(visible)).view(1, -1, 1, 1)
        return constant.view(-1, 1, 1) + slope.view(-1, 1, 1) * visible.to(wide).log()


class RowScale(nn.Module):
    """Learned scale of each row o of an attention's output, exp(g + β · log‖o‖ + w · o/‖o‖), limited to 1/150 … 150.

    β = 0 leaves norms as they are, and β = -1 replaces them by exp(g + w · o/‖o‖). It starts as 1.

    Attributes:
        gain: g, (num_heads,). power: β, (num_heads,). direction: w of all heads, (num_heads · head_dim,).
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads: int = num_heads
        self.head_dim: int = head_dim
        self.gain: nn.Parameter = nn.Parameter(torch.zeros(num_heads))
        self.power: nn.Parameter = nn.Parameter(torch.zeros(num_heads))
        self.direction: nn.Parameter = nn.Parameter(torch.zeros(num_heads * head_dim))

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, output: Tensor) -> Tensor:
        """Return the factor of each row, (B, Hq, N, 1), in float32 or better, of an output (B, Hq, N, Dv)."""
        _check("RowScale: output", output, self.num_heads, self.head_dim)
        wide, gain, power, direction = _to_float32(output, self.gain, self.power, self.direction)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True) + EPS
        # not a product of matrices, which for one column takes longer
        cosine = (wide * direction.view(self.num_heads, 1, -1)).sum(-1, keepdim=True) / norm
        exponent = gain.view(-1, 1, 1) + power.view(-1, 1, 1) * norm.log() + cosine
        return exponent.clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE).exp()


class QueryTerm(nn.Module):
    """Learned term of the bias in each query, w·q + Σ_r λ_r (u_r·q)². It starts as 0.

    Attributes:
        linear: w of all heads, (num_heads · query_dim,). directions: u of all heads, (num_heads · query_dim · R,); R is
            query_dim, or ``MAX_DIRECTIONS`` if that is less. curvature: λ of all heads, (num_heads · R,).
    """

    def __init__(self, num_heads: int, query_dim: int) -> None:
        super().__init__()
        self.num_heads: int = num_heads
        self.query_dim: int = query_dim
        directions = min(query_dim, MAX_DIRECTIONS)
        self.linear: nn.Parameter = nn.Parameter(torch.empty(num_heads * query_dim))
        self.directions: nn.Parameter = nn.Parameter(torch.empty(num_heads * query_dim * directions))
        self.curvature: nn.Parameter = nn.Parameter(torch.empty(num_heads * directions))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.linear)
        nn.init.zeros_(self.curvature)
        nn.init.normal_(self.directions, std=max(self.query_dim, 1) ** -0.5)

    def forward(self, query: Tensor) -> Tensor:
        """Return the term of each query, (B, Hq, N, 1), in float32 or better, for queries (B, Hq, N, query_dim)."""
        _check("QueryTerm: query", query, self.num_heads, self.query_dim)
        heads, width = self.num_heads, self.query_dim
        forms = torch.cat([self.directions.view(heads, width, -1).mT, self.linear.view(heads, 1, width)], 1)
        # products with so few columns are slower on a CPU than transposed ones, (B, H, R + 1, N), of dense queries
        query, forms, curvature = _to_float32(query.contiguous(), forms, self.curvature)
        with without_autocast(query.device.type):
            projections = forms @ query.mT
            squares = curvature.view(heads, 1, -1) @ projections[:, :, :-1].square()
            return (projections[:, :, -1:] + squares).mT


class QuadraticBias(VisibleKeysLinearBias):
    """Bias of c + a · log(visible keys) + w·q + Σ_r λ_r (u_r·q)², and a learned scale of each row of the output.

    Both depend on the query and its own output only, so that decoding with a KV cache is exact.

    Args:
        num_heads: number of query heads.
        head_dim: number of features of a value.
        query_dim: number of features of a query.

    Attributes:
        query_term: the terms in q. row_scale: the scale. (Modules of their own, because a module's offloaded parameters
            are present during its call only.)
    """

    needs_query = True

    def __init__(self, num_heads: int, head_dim: int, query_dim: int) -> None:
        super().__init__(num_heads)
        self.query_term: QueryTerm = QueryTerm(num_heads, query_dim)
        self.row_scale: RowScale = RowScale(num_heads, head_dim)

    def extra_repr(self) -> str:
        sizes = f"head_dim={self.row_scale.head_dim}, query_dim={self.query_term.query_dim}"
        return f"{super().extra_repr()}, {sizes}"

    def forward(self, *_: Any, visible: int | Tensor | None = None, query: Tensor | None = None, **__: Any) -> Tensor:
        """Return the bias for ``visible`` and ``query``, which must be given: (B, num_heads, N, 1), as above."""
        if query is None:
            raise ValueError(f"{type(self).__name__} depends on the queries: pass query")
        return super().forward(visible=visible) + self.query_term(query)

    def scaled(self, output: Tensor) -> Tensor:
        return (output * self.row_scale(output)).to(output.dtype)


class AlibiLinearBias(VisibleKeysLinearBias):
    """``VisibleKeysLinearBias`` where each key is counted by ALiBi's weight: it starts as ``AlibiKeysBias``."""

    needs_alibi = True


class AlibiQuadraticBias(QuadraticBias):
    """``QuadraticBias`` where each key is counted by ALiBi's weight: it starts as ``AlibiKeysBias``."""

    needs_alibi = True


def _check(name: str, rows: Tensor, num_heads: int, width: int) -> None:
    """Raise ValueError unless rows are (B, num_heads, N, width); one head would be broadcast."""
    if rows.dim() != 4 or rows.shape[1] != num_heads or rows.shape[3] != width:
        expected = f"(batch, {num_heads}, length, {width})"
        raise ValueError(f"{name} must be {expected}, as the parameters, got {tuple(rows.shape)}")


def _to_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in their common dtype, or in float32 if that is less precise."""
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    return tuple(t.to(dtype) for t in tensors)
