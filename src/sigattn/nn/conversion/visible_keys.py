"""Count the keys that the queries of a sample see, for the default bias of layers that were written for softmax."""

from __future__ import annotations

import torch
from torch import Tensor

HIDDEN_BELOW = -1000.0  # σ(-1000) is 0 in every dtype; masks use -inf, the smallest number, -1e9 or -1e4


def is_visible(mask: Tensor) -> Tensor:
    """Return True where a mask, bool (True = attend) or added to the logits, lets a query see a key."""
    return mask if mask.dtype is torch.bool else mask > HIDDEN_BELOW


def count_keys_per_query(mask: Tensor, num_keys: int) -> Tensor:  # (..., N or 1, 1)
    """Count the keys that each query sees, at least 1, under a mask (..., N or 1, M or 1)."""
    visible = is_visible(mask)
    return visible.expand(*visible.shape[:-1], num_keys).sum(-1, keepdim=True).clamp(min=1)


def count_visible_keys(mask: Tensor, num_keys: int, *, has_heads: bool = True) -> Tensor:
    """Count, for each sample, the keys that at least one query of the sample sees.

    Padding is not counted. Under a causal mask every key counts, because the last query sees all of them.

    Args:
        mask: bool (True = attend) or added to the logits; broadcastable to (..., H, N, M).
        num_keys: M.
        has_heads: False if the mask broadcasts to (..., N, M) instead, without heads.

    Returns:
        At least 1; int64, of the mask's dimensions, with size 1 for heads, queries and keys.
    """
    visible = is_visible(mask)
    shared = [d for d in ((-2, -3) if has_heads else (-2,)) if mask.dim() >= -d]
    for dim in shared:
        visible = visible.any(dim, keepdim=True)
    return count_keys_per_query(visible, num_keys)
