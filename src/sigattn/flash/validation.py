"""Validation of the arguments of ``sigattn.flash`` that the operators do not have."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sigattn.ops import scalars, validation
from sigattn.ops.validation import raise_error

CACHE_NAMES = ("q", "k_cache", "v_cache", "k", "v", "block_table")


def cache(caller: str, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, batch_idx: Any, table: Any) -> Any:
    """Return the table of pages, None if sample b has cache b; raise unless q (B, N, Hq, D) and the cache fit."""
    if batch_idx is not None and table is not None:
        raise_error(caller, ValueError, "cache_batch_idx and block_table exclude each other: pass one of them",
              cache_batch_idx=batch_idx, block_table=table)  # fmt: skip
    if batch_idx is not None:
        shape = (q.shape[0],) if isinstance(q, Tensor) and q.dim() else (None,)
        device = q.device if isinstance(q, Tensor) else None
        validation.integers(caller, "cache_batch_idx", batch_idx, shape, "(B,)", device)
        table = batch_idx.unsqueeze(1)
    validation.cache(caller, CACHE_NAMES, q, k_cache, v_cache, k, v, table)
    return table


def new_keys(caller: str, k_cache: Any, v_cache: Any, k: Any, v: Any) -> None:
    """Raise unless k (total_new, Hkv, D) and v (total_new, Hkv, Dv) fit the cache."""
    if k is None or v is None:
        raise_error(caller, ValueError, "cu_seqlens_k_new holds the offsets of k and v: pass both", k=k, v=v)
    for name, t in (("k", k), ("v", v)):
        if not isinstance(t, Tensor) or t.dim() != 3:
            raise_error(
                caller, ValueError, f"with cu_seqlens_k_new, {name} must be (total, heads, head_dim)", **{name: t}
            )
    validation.tensors(caller, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    shapes = [(*a.shape[-2:], b.shape[-1]) for a, b in ((k, v), (k_cache, v_cache))]
    if shapes[0] != shapes[1] or k.shape[:2] != v.shape[:2]:
        message = "k and v must have the cache's heads and head_dim"
        raise_error(caller, ValueError, message, k=k, v=v, k_cache=k_cache, v_cache=v_cache)


def pages(caller: str, q: Any, k: Any, v: Any, table: Any, batch: int) -> None:
    """Raise unless k (pages, page_size, Hkv, D), v (pages, page_size, Hkv, Dv) and block_table (B, …) fit together."""
    for name, t in (("k", k), ("v", v)):
        if not isinstance(t, Tensor) or t.dim() != 4:
            message = f"with block_table, {name} must be (pages, page_size, heads, head_dim)"
            raise_error(caller, ValueError, message, **{name: t}, block_table=table)
    if k.shape[:3] != v.shape[:3]:
        raise_error(caller, ValueError, "k and v must have the same pages, page_size and heads", k=k, v=v)
    validation.integers(caller, "block_table", table, (batch, None), "(B, pages of each)", q.device)


def rotary(caller: str, cos: Any, sin: Any, q: Tensor, k: Any) -> None:
    """Raise unless cos and sin are (positions, rotary_dim / 2), with rotary_dim at most head_dim."""
    rotary = {"rotary_cos": cos, "rotary_sin": sin}
    if k is None:
        raise_error(caller, ValueError, "rotary_cos and rotary_sin apply to new keys: pass k and v as well", **rotary)
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or not cos.is_floating_point():
        raise_error(caller, TypeError, "rotary_cos and rotary_sin must be floating-point tensors", **rotary)
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[-1] or not cos.shape[1]:
        message = "rotary_cos and rotary_sin must be (positions, rotary_dim / 2), rotary_dim at most head_dim"
        raise_error(caller, ValueError, message, q=q, **rotary)
    for name, t in rotary.items():
        validation.same_device(caller, name, t, q, "q")


def packed_together(caller: str, name: str, t: Any, dimensions: int, parts: int) -> tuple[Tensor, ...]:
    """Return the parts of (…, parts, heads, head_dim), unbound along the third dimension from the end."""
    if not isinstance(t, Tensor):
        raise_error(caller, TypeError, f"{name} must be a tensor", **{name: t})
    if t.dim() != dimensions or t.shape[-3] != parts:
        shape = "(batch, length, " if dimensions == 5 else "(total, "
        raise_error(caller, ValueError, f"{name} must be {shape}{parts}, heads, head_dim)", **{name: t})
    return t.unbind(-3)


def bias(caller: str, b: Any, q: Tensor, batch: int, queries: int | None = None) -> None:
    """Raise unless b is a number or a tensor (), (B,), (B or 1, Hq or 1) or, with ``queries``, one for each query."""
    heads = q.shape[-2]
    if not isinstance(b, Tensor):
        scalars.real(caller, "sigmoid_bias, if not a tensor,", b)
        return
    if not b.is_floating_point():
        raise_error(caller, TypeError, "sigmoid_bias must be floating point", sigmoid_bias=b)
    full = (batch, heads) if queries is None or b.dim() < 3 else (batch, heads, queries)
    broadcasts = b.dim() == len(full) and validation.broadcasts(b.shape, full)
    if b.dim() and tuple(b.shape) != (batch,) and not broadcasts:
        message = f"sigmoid_bias must be (), (B,) = ({batch},) or (B or 1, Hq or 1) = ({batch} or 1, {heads} or 1)"
        if queries is not None:
            message += f" or (B or 1, Hq or 1, N or 1) = ({batch} or 1, {heads} or 1, {queries} or 1)"
        raise_error(caller, ValueError, message, sigmoid_bias=b)
    validation.same_device(caller, "sigmoid_bias", b, q, "q")
