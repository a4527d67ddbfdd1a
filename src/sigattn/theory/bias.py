"""Bias that makes sigmoid weights sum to one (App. E), and the rules that the paper derives from it."""

import math

import torch
from torch import Tensor


def bias_bounds(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds of App. E's proposition: -log(n - 1) - max z ≤ b* ≤ -log(n - 1) - min z.

    Logits are (..., n), the lower and the upper bound (...) each. Raises ValueError if n < 2 or a logit is not finite.
    """
    n = logits.shape[-1] if logits.dim() else 0
    if n < 2:
        raise ValueError(f"the normalizing bias needs at least 2 logits per row, got shape {tuple(logits.shape)}")
    if not logits.isfinite().all():
        raise ValueError("the normalizing bias needs finite logits, got NaN or infinity")
    return -math.log(n - 1) - logits.amax(-1), -math.log(n - 1) - logits.amin(-1)


def normalizing_bias(logits: Tensor) -> Tensor:
    """Return the unique b* with Σ_i σ(z_i + b*) = 1 (App. E's proposition) for each row of logits.

    The sum increases with b, so b* is found by bisection from the proposition's bounds. The bisection ends when float64
    has no number between the bounds, so that b* is exact to rounding. Logits are (..., n), the result is (...) in
    float64. Raises ValueError if n < 2 (a single weight of 1 needs an infinite bias) or a logit is not finite.

    >>> normalizing_bias(torch.zeros(5)).item() == -math.log(4)
    True
    """
    z = logits.double()
    low, high = bias_bounds(z)
    middle = low + (high - low) / 2
    while ((low < middle) & (middle < high)).any():
        above = torch.sigmoid(z + middle.unsqueeze(-1)).sum(-1) > 1
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        middle = low + (high - low) / 2
    return middle
