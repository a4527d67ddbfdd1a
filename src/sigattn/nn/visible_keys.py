"""Bias of attention functions of other layers, which depends on the keys that their masks let queries see."""

import functools

import torch
from torch import Tensor

from sigattn.nn.bias import AttentionBias
from sigattn.nn.functional import MaskSpec, num_visible_keys
from sigattn.ops.problem import NORMALIZED_MARGIN, at_least, combine_window, log_length_bias, log_size_bias
from sigattn.ops.reference import band

HIDDEN_BELOW = -90.0  # e^-90 is no normal float32; masks use -inf, the smallest number, -1e9, -1e4, -100 + bias (Swin)


def is_visible(mask: Tensor) -> Tensor:
    """Return True where a mask, bool (True = attend) or added to the logits, lets a query see a key."""
    return mask if mask.dtype is torch.bool else mask > HIDDEN_BELOW


def join_masks(*masks: Tensor | None) -> Tensor | None:
    """Return one mask of several, bool (True = attend) or added to the logits; None if all are None."""
    present = [mask for mask in masks if mask is not None]
    seen = [mask for mask in present if mask.dtype is torch.bool]
    added = [mask for mask in present if mask.dtype is not torch.bool]
    visible = functools.reduce(torch.logical_and, seen) if seen else None
    if not added:
        return visible
    total = functools.reduce(torch.add, added)
    return total if visible is None else total.masked_fill(~visible, -torch.inf)


def count_keys_per_query(mask: Tensor, num_keys: int) -> Tensor:  # (..., N or 1, 1)
    """Count the keys that each query sees, at least 1, under a mask (..., N or 1, M or 1)."""
    visible = is_visible(mask)
    return visible.expand(*visible.shape[:-1], num_keys).sum(-1, keepdim=True).clamp(min=1)


def evaluate_bias(
    bias: AttentionBias | None, query: Tensor, key: Tensor, mask: Tensor | None = None, *, normalize: bool,
    is_causal: bool = False, window: tuple[int, int] | None = None,
) -> float | Tensor | None:  # fmt: skip
    """Return b of a bias for a call of ``sigmoid_attention`` with these arguments; None for the operator's own rule.

    A bias of None is -log of the number of keys that at least one query of a sample sees, 6 less with ``normalize``.
    Query and key are (B, Hq, N, D) and (B, Hkv, M, D); biases without needs_visible accept any (…, N, D) and (…, M, D).

    Raises:
        ValueError: if the bias has a value for each head or query, and query is nested or has no four dimensions.
        TypeError: for a bias that depends on more than these arguments, as ALiBi's, which is a part of the mask.
    """
    if bias is None:
        b_of_samples = _bias_of_samples(query, key, mask, is_causal)
        return b_of_samples - NORMALIZED_MARGIN if normalize and b_of_samples is not None else b_of_samples
    if bias.needs_alibi:
        raise TypeError(f"{type(bias).__name__} is for sigattn.nn.Attention only, not for other layers")
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    visible = None
    if bias.needs_visible:
        if query.is_nested or query.dim() != 4:
            raise ValueError(
                f"{type(bias).__name__} has a value for each head and query and needs plain queries of shape "
                f"(B, H, N, D), got {'nested ones' if query.is_nested else tuple(query.shape)}"
            )
        sides = combine_window(window, is_causal)
        visible = _count_visible(mask, num_queries, num_keys, sides, query.device)
    b = bias(num_queries, num_keys, device=query.device, visible=visible)
    if isinstance(b, Tensor) and b.dim() > 2 and query.dim() == 4 and b.shape[-3] not in (1, query.shape[1]):
        raise ValueError(
            f"the layer has biases of {b.shape[-3]} heads, and the query has {query.shape[1]}: convert the layer "
            "again; or, if tensor parallelism (tp_plan) split its heads, load the model without it"
        )
    if isinstance(b, Tensor) and b.dim() == 3 and query.dim() != 4:
        raise ValueError(
            f"a bias for each head needs queries of shape (B, H, N, D), got {tuple(query.shape)}: take one bias for "
            "the layer"
        )
    return bias.of_call(b, normalize)


def _bias_of_samples(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> float | Tensor | None:
    if mask is not None:
        visible = is_visible(mask)  # (..., H or 1, N or 1, M or 1), without heads if the query has three dimensions
        for dim in (-2, -3) if query.dim() > 3 else (-2,):
            visible = visible.any(dim, keepdim=True) if mask.dim() >= -dim else visible
        return log_length_bias(count_keys_per_query(visible, key.shape[-2]))
    if key.layout is torch.jagged:
        lengths: Tensor = key.offsets().diff().clamp(min=1)  # type: ignore[attr-defined]
        return log_length_bias(lengths.view(-1, 1, 1, 1))
    if query.is_nested:
        return None
    # under a causal mask no query sees the keys beyond the last query
    return log_size_bias(torch.sym_min(query.shape[-2], key.shape[-2]) if is_causal else key.shape[-2], query.device)


def _count_visible(
    mask: Tensor | None, num_queries: int, num_keys: int, window: tuple[int, int], device: torch.device
) -> int | Tensor:
    """Count the keys that each query sees, at least 1: (B or 1, H or 1, N or 1, 1), float32; if all see all, a number.

    While compiling it is always a tensor, because a number would be fixed in the program.
    """
    if mask is not None:
        seen = is_visible(mask)
        seen = seen if max(window) < 0 else seen & band(*window, (0, num_queries), (0, num_keys), device)
        return at_least(count_keys_per_query(seen, num_keys).float(), 4)
    if max(window) < 0:  # the same number for each query
        if not torch.compiler.is_compiling():
            return max(num_keys, 1)
        return torch.full((1, 1, 1, 1), torch.sym_max(num_keys, 1), dtype=torch.float32, device=device)
    return num_visible_keys(num_queries, num_keys, MaskSpec(False, window), device).clamp(min=1)
