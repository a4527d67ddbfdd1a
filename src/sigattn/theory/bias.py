"""Bias that makes sigmoid weights sum to one (App. E), and the rules that the paper derives from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def bias_bounds(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds of App. E's proposition: -log(n - 1) - max z ≤ b* ≤ -log(n - 1) - min z.

    Args:
        logits: (..., n), n ≥ 2, floating point and finite.

    Returns:
        The lower and the upper bound, each (...).

    Raises:
        ValueError: if n < 2 or a logit is not finite.
    """
    n = _check(logits)
    return -math.log(n - 1) - logits.amax(-1), -math.log(n - 1) - logits.amin(-1)


def normalizing_bias(logits: Tensor, iterations: int = 200) -> Tensor:
    """Return the unique b* with Σ_i σ(z_i + b*) = 1 (App. E's proposition) for each row of logits.

    The sum increases with b, so b* is found by bisection from the proposition's bounds. The bisection ends when float64
    has no number between the bounds, so that b* is exact to rounding.

    Args:
        logits: (..., n), n ≥ 2, floating point and finite; solved in float64.
        iterations: largest number of bisection steps.

    Returns:
        (...), float64.

    Raises:
        ValueError: if n < 2 (a single weight of 1 needs an infinite bias) or a logit is not finite.

    >>> normalizing_bias(torch.zeros(5)).item() == -math.log(4)
    True
    """
    z = logits.double()
    low, high = bias_bounds(z)
    for _ in range(iterations):
        middle = low + (high - low) / 2
        if not ((low < middle) & (middle < high)).any():
            break
        above = torch.sigmoid(z + middle.unsqueeze(-1)).sum(-1) > 1
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return low + (high - low) / 2


def order_optimal_bias(n: int, epsilon: float) -> float:
    """Return the order-optimal bias of App. E, -max{√(1/ε), log n}, for logits of variance 1.

    By Chebyshev's inequality a logit lies within M = √(1/ε) with probability at least 1 - ε.

    Args:
        n: number of keys, at least 1. epsilon: in (0, 1].

    Raises:
        ValueError: if either is out of range.

    >>> order_optimal_bias(4096, 0.1) == -math.log(4096)
    True
    """
    if n < 1 or not 0 < epsilon <= 1:
        raise ValueError(f"order_optimal_bias: needs n ≥ 1 and ε in (0, 1], got n = {n}, ε = {epsilon}")
    return -max(math.sqrt(1 / epsilon), math.log(n))


def gradient_gap(logits: Tensor, bias: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the absolute differences from softmax of weights and of derivatives.

    They are ``|p - p*|`` and ``|p (1 - p) - p* (1 - p*)|``.

    App. E: both functions have ∂p_i/∂z_i = p_i (1 - p_i), so the derivatives are equal if p = p* or p = 1 - p*, because
    p (1 - p) - p* (1 - p*) = (p - p*) (1 - p - p*).

    Args:
        logits: (..., n).
        bias: a number, or one per row: (...).

    Returns:
        Differences of the weights and of the derivatives, each (..., n).
    """
    b = bias.unsqueeze(-1) if isinstance(bias, Tensor) else bias
    p, softmax = torch.sigmoid(logits + b), logits.softmax(-1)
    return (p - softmax).abs(), (p * (1 - p) - softmax * (1 - softmax)).abs()


def _check(logits: Tensor) -> int:
    n = logits.shape[-1] if logits.dim() else 0
    if n < 2:
        raise ValueError(f"the normalizing bias needs at least 2 logits per row, got shape {tuple(logits.shape)}")
    if not logits.isfinite().all():
        raise ValueError("the normalizing bias needs finite logits, got NaN or infinity")
    return n
