"""Spectral norm of the Jacobian of an attention head, exact and matrix-free, and its bounds (Thm. 3.2, App. D).

Tokens are rows: φ(X) = activation(scale · X W_q (X W_k)ᵀ + b) X W_v. In this convention the matrix of the theorem is
A = scale · W_q W_kᵀ. (The paper writes W_qᵀ W_k, because its tokens are columns, and leaves the scale out.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.ops import reference
from sigattn.ops.problem import Problem, make_problem


@dataclass(frozen=True)
class Head:
    """Attention head without output projection: a function of the tokens, (n, d) → (n, e).

    W_q and W_k are (d, k), W_v is (d, e). The bias None means -log n, as in the paper (softmax has none), the scale
    None k^-1/2. ``hybrid_norm`` applies a LayerNorm without parameters to the output.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    activation: str = "sigmoid"  # or "softmax"
    bias: float | None = None
    scale: float | None = None
    hybrid_norm: bool = False

    @property
    def a(self) -> Tensor:
        """Matrix of Theorem 3.2, scale · W_q W_kᵀ: (d, d)."""
        return self.scale_value * self.query @ self.key.mT

    @property
    def scale_value(self) -> float:
        """Factor of the logits, with None replaced by k^-1/2."""
        return self.query.shape[1] ** -0.5 if self.scale is None else self.scale

    def bias_value(self, n: int) -> float:
        bias = -math.log(n) if self.bias is None else self.bias
        return 0.0 if self.activation == "softmax" else bias

    def __call__(self, x: Tensor) -> Tensor:  # (n, d) → (n, e)
        """Return φ(X), computed by the reference operator, which supports forward-mode and second derivatives."""
        q, k, v = (t[None, None] for t in (x @ self.query, x @ self.key, x @ self.value))  # (1, 1, n, ·)
        problem = make_problem(Problem, q, k, v, scale=self.scale_value, bias=self.bias_value(len(x)))
        out = reference.attention(problem, self.activation)[0, 0]
        return F.layer_norm(out, out.shape[-1:]) if self.hybrid_norm else out

    def logits(self, x: Tensor) -> Tensor:  # (n, n)
        """Return the logits, scale · X W_q (X W_k)ᵀ + b."""
        return x @ self.a @ x.mT + self.bias_value(len(x))


def jacobian_norm(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the spectral norm of the Jacobian at x, computed from the whole matrix (for small problems)."""
    jacobian = torch.func.jacrev(function)(x)
    return _norm(jacobian.reshape(-1, x.numel())).item()


def jacobian_norm_matrix_free(function: Callable[[Tensor], Tensor], x: Tensor, tolerance: float = 1e-9) -> float:
    """Return the spectral norm of the Jacobian at x by power iteration on JᵀJ, without forming the matrix.

    A step takes one forward-mode and one reverse-mode product. The norm converges from below; the iteration stops when
    a step increases it by less than ``tolerance`` relative to itself, or after 300 steps.
    """
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    v /= v.norm()
    pullback = torch.func.vjp(function, x)[1]
    before = 0.0
    for _ in range(300):
        jv: Tensor = torch.func.jvp(function, (x,), (v,))[1]
        norm = jv.norm().item()
        if norm == 0 or (norm - before < tolerance * norm and before):
            return norm
        before = norm
        (w,) = pullback(jv)
        v = w / w.norm()
    return before


def sigmoid_bound(head: Head, x: Tensor) -> float:
    """Return the bound of Theorem 3.2, ‖W_v‖ (σ∞ + 2 σ'∞ ‖A‖ mean ‖x_i‖²).

    σ∞ and σ'∞ are n times the largest σ and σ' of the logits.
    """
    return _sigmoid_bound(head, x).item()


def _sigmoid_bound(head: Head, x: Tensor) -> Tensor:
    p = torch.sigmoid(head.logits(x))
    sigma, slope = len(x) * p.max(), len(x) * (p * (1 - p)).max()
    return _norm(head.value) * (sigma + 2 * slope * _norm(head.a) * x.square().sum(-1).mean())


def softmax_bound(head: Head, x: Tensor) -> float:
    """Return Castin et al.'s (2023) bound for softmax attention, √3 ‖W_v‖ √(‖A‖² R⁴ (4n + 1) + n), R = max ‖x_i‖."""
    n, radius = len(x), x.norm(dim=-1).max()
    inside = _norm(head.a) ** 2 * radius**4 * (4 * n + 1) + n
    return (math.sqrt(3) * _norm(head.value) * inside.sqrt()).item()


def _norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, 2)


# -- sequences with a large Jacobian ----------------------------------------------------------------------------------


def exponential_sequence(radius: float) -> Tensor:
    """Return one-dimensional tokens of norm at most R at which softmax attention's Jacobian grows like R² e^(R²/8).

    Castin et al.'s Theorem 3.4 says that such sequences exist; this one is simple. n - 1 = e^(R²/4) tokens are at R/2,
    one at R. With A = 1 each of the many gives half its weight to the single one, so that moving it moves all outputs.
    """
    many = max(1, round(math.exp(radius**2 / 4)))
    return torch.tensor([[radius / 2]] * many + [[radius]], dtype=torch.float64)


def exponential_lower_bound(radius: float) -> float:
    """Return a lower bound of softmax attention's Jacobian norm at ``exponential_sequence``, all weights 1.

    It is √(n - 1) · ½ (1 + R²/8), up to the rounding of n.
    """
    many = max(1, round(math.exp(radius**2 / 4)))
    share = math.exp(radius**2 / 4) / (math.exp(radius**2 / 4) + many)  # weight that a token at R/2 gives to that at R
    slope = (1 - share) * radius**2 / 4  # (x_n - output of a token at R/2) times the query R/2
    return math.sqrt(many) * share * (1 + slope)


# -- search for a counterexample --------------------------------------------------------------------------------------


def search(trials: int, climbs: int) -> tuple[list[float], list[float]]:
    """Return ratios of norm to bound in Theorem 3.2 for random inputs, and along gradient ascents on the ratio.

    Sizes and biases of the ``trials`` inputs are drawn, and scales of weights and tokens over two orders of magnitude.
    Each of the ``climbs`` is 60 steps with respect to tokens and weights from a random input.
    """
    generator = torch.Generator().manual_seed(0)
    ratios = [_ratio(*_draw(generator)).item() for _ in range(trials)]
    climbed = []
    for _ in range(climbs):
        x, q, k, v, bias = _draw(generator)
        optimizer = torch.optim.Adam([t.requires_grad_() for t in (x, q, k, v)], lr=0.1)
        for _ in range(60):
            ratio = _ratio(x, q, k, v, bias)
            climbed.append(ratio.item())
            optimizer.zero_grad()
            (-ratio.log()).backward()
            optimizer.step()
    return ratios, climbed


def _draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, float | None]:
    n, d, k = (int(torch.randint(1, limit, (), generator=generator)) for limit in (7, 4, 3))

    def randn(*shape: int) -> Tensor:
        size = 10 ** (torch.rand((), generator=generator, dtype=torch.float64) * 2 - 1)
        return size * torch.randn(shape, generator=generator, dtype=torch.float64)

    kind = int(torch.randint(0, 3, (), generator=generator))
    bias = [None, 0.0, float(4 * torch.randn((), generator=generator))][kind]
    return randn(n, d), randn(d, k), randn(d, k), randn(d, d), bias


def _ratio(x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: float | None) -> Tensor:
    """Return the ratio of the exact norm to the bound as a differentiable tensor."""
    head = Head(q, k, v, bias=bias)
    return _norm(torch.func.jacrev(head)(x).reshape(-1, x.numel())) / _sigmoid_bound(head, x)
