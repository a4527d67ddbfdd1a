"""Conversion of checked arguments to the canonical form of problems, shared by the three operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sigattn.ops.problem import UNLIMITED


def combine_window(window: tuple[int, int] | None, is_causal: bool) -> tuple[int, int]:
    """Return the window (left, right) that combines ``window`` and ``is_causal``."""
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    if is_causal:
        right = 0 if right == UNLIMITED else min(right, 0)
    return left, right


def new_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """Return the seed of a call's dropout, drawn from PyTorch's generator of a device; None without dropout."""
    return torch.randint(1 << 62, (), dtype=torch.int64, device=device) if dropout_p else None


def bias_tensor(bias: Any, query: Tensor, dimensions: int) -> Tensor | None:
    """Return the bias as an operand of an op.

    Args:
        bias: None, a tensor, or a number, which becomes a 0-d tensor on the CPU, so that backends read it without
            synchronising.
        query: the query. In a graph compiled for a device other than the CPU, a number becomes a tensor on the query's
            device, because a CUDA graph would replay the number it was recorded with; in float32, or the query's dtype
            if that is wider.
        dimensions: number of dimensions of that tensor, and least number of dimensions of a tensor that is passed.
    """
    if bias is None:
        return None
    if isinstance(bias, Tensor):
        return at_least(bias, dimensions)
    if not isinstance(bias, (float, int, torch.SymFloat, torch.SymInt)):  # another library's number
        bias = float(bias)
    if not torch.compiler.is_compiling():
        return torch.tensor(bias, dtype=torch.float64, device="cpu")
    # a sum, because the compiler keeps a number symbolic in a sum
    if query.device.type == "cpu":
        return torch.zeros((), dtype=torch.float64, device="cpu") + bias
    dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.zeros((1,) * dimensions, dtype=dtype, device=query.device) + bias


def at_least(t: Tensor, dimensions: int) -> Tensor:
    """Return t with leading dimensions of size 1, so that it has at least this number of dimensions."""
    return t if t.dim() >= dimensions else t[(None,) * (dimensions - t.dim())]


def two_sided_slopes(slopes: Tensor | None) -> Tensor | None:  # (B or 1, Hq, 2)
    """Return slopes of any allowed shape as one slope for keys before the query and one for keys after it."""
    if slopes is None or slopes.dim() == 3:
        return slopes
    slopes = at_least(slopes, 2)
    return slopes.unsqueeze(-1).expand(*slopes.shape, 2)
