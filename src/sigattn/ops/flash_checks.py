"""Checks of the arguments of ``sigattn.flash``, with messages in terms of its layouts (compare ``checks``)."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from sigattn.ops import scalars
from sigattn.ops.mask import refuse_subclass
from sigattn.ops.validation import describe


def _wrong(caller: str, error: type[Exception], message: str, **arguments: Any) -> NoReturn:
    raise error(f"{caller}: {message}; got {describe(**arguments)}")


def dense(caller: str, q: Any, k: Any, v: Any) -> None:
    """Raise unless q (B, N, Hq, D), k (B, M, Hkv, D) and v (B, M, Hkv, Dv) fit together."""
    _check_operands(caller, q, k, v, 4, "(batch, length, heads, head_dim)")
    if not (q.shape[0] == k.shape[0] == v.shape[0]):
        _wrong(caller, ValueError, "q, k and v must have the same batch size (dimension 0)", q=q, k=k, v=v)


def varlen(
    caller: str, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any
) -> tuple[int, int]:
    """Raise unless q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv) and the sequences fit together.

    Returns:
        ``max_seqlen_q`` and ``max_seqlen_k`` as int.
    """
    _check_operands(caller, q, k, v, 3, "(total, heads, head_dim)")
    starts(caller, q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return longest(caller, "max_seqlen_q", max_seqlen_q), longest(caller, "max_seqlen_k", max_seqlen_k)


def longest(caller: str, name: str, most: Any) -> int:
    """Return the length of the longest sequence as int; raise if it is negative or not an integer."""
    length = scalars.integer(caller, name, most)
    if not torch.compiler.is_compiling() and length < 0:  # a traced length is checked by the op
        _wrong(caller, ValueError, f"{name} is a length and must be at least 0", **{name: most})
    return length


def cache(caller: str, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, batch_idx: Any, table: Any) -> None:
    """Raise unless q (B, N, Hq, D), the cache, the new keys and values, and the indices of the cache fit together."""
    _check_operands(caller, q, k_cache, v_cache, 4, "(batch, length, heads, head_dim)", ("q", "k_cache", "v_cache"))
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    if (k is None) != (v is None):
        _wrong(caller, ValueError, "k and v must both be given, or neither", k=k, v=v)
    if k is not None:
        _check_operands(caller, q, k, v, 4, "(batch, length, heads, head_dim)")
        if k.shape[0] != q.shape[0]:
            _wrong(caller, ValueError, "q, k and v must have the same batch size (dimension 0)", q=q, k=k, v=v)
        if (k.shape[2], k.shape[3], v.shape[3]) != (k_cache.shape[2], k_cache.shape[3], v_cache.shape[3]):
            _wrong(caller, ValueError, "k and v must have the cache's heads and head_dim", k=k, v=v, **given)
    for name, t in (("cache_batch_idx", batch_idx), ("block_table", table)):
        if t is not None and not _integers(t):
            _wrong(caller, TypeError, f"{name} must be a tensor of integers", **{name: t})
        if t is not None and t.device != q.device:
            _wrong(caller, ValueError, f"{name} must be on q's device: move it with .to(device)", q=q, **{name: t})
    if batch_idx is not None and table is not None:
        _wrong(caller, ValueError, "cache_batch_idx and block_table exclude each other: pass one of them",
               cache_batch_idx=batch_idx, block_table=table)  # fmt: skip
    if table is not None and (table.dim() != 2 or len(table) != len(q)):
        _wrong(caller, ValueError, "block_table must be (B, pages of each sample)", q=q, block_table=table)
    if batch_idx is not None and tuple(batch_idx.shape) != (len(q),):
        _wrong(caller, ValueError, "cache_batch_idx must be (B,)", q=q, cache_batch_idx=batch_idx)
    if batch_idx is None and table is None and len(k_cache) != len(q):
        message = "the cache must have q's batch size; else pass block_table (for pages) or cache_batch_idx"
        _wrong(caller, ValueError, message, **given)


def new_keys(caller: str, q: Tensor, k_cache: Any, v_cache: Any, k: Any, v: Any) -> None:
    """Raise unless k (total_new, Hkv, D) and v (total_new, Hkv, Dv) fit the cache."""
    if k is None or v is None:
        _wrong(caller, ValueError, "cu_seqlens_k_new holds the offsets of k and v: pass both", k=k, v=v)
    _check_operands(caller, q[0] if isinstance(q, Tensor) and q.dim() == 4 and len(q) else q, k, v, 3,
              "(total, heads, head_dim)")  # fmt: skip
    _check_operands(caller, q, k_cache, v_cache, 4, "(batch, length, heads, head_dim)", ("q", "k_cache", "v_cache"))
    if (k.shape[1], k.shape[2], v.shape[2]) != (k_cache.shape[2], k_cache.shape[3], v_cache.shape[3]):
        message = "k and v must have the cache's heads and head_dim"
        _wrong(caller, ValueError, message, k=k, v=v, k_cache=k_cache, v_cache=v_cache)


def of_samples(caller: str, name: str, t: Any, q: Tensor, batch: int | None = None) -> None:
    """Raise unless t is None or (B,) integers on q's device; B is ``batch``, or q's first dimension if that is None."""
    if t is None:
        return
    batch = len(q) if batch is None else batch
    if not _integers(t):
        _wrong(caller, TypeError, f"{name} must be a tensor of integers", **{name: t})
    if tuple(t.shape) != (batch,):
        _wrong(caller, ValueError, f"{name} must be (B,) = ({batch},)", q=q, **{name: t})
    if t.device != q.device:
        _wrong(caller, ValueError, f"{name} must be on q's device: move it with .to(device)", q=q, **{name: t})


def starts(caller: str, q: Any, **cu_seqlens: Any) -> None:
    """Raise unless each tensor is (B + 1,) integers on q's device, with the same B."""
    for name, t in cu_seqlens.items():
        if not _integers(t):
            _wrong(caller, TypeError, f"{name} must be a tensor of integers", **{name: t})
        if t.dim() != 1 or not len(t):
            _wrong(caller, ValueError, f"{name} must be (B + 1,): 0, then the end of each sequence", **{name: t})
        if t.device != q.device:
            _wrong(caller, ValueError, f"{name} must be on q's device: move it with .to(device)", q=q, **{name: t})
    if len({len(t) for t in cu_seqlens.values()}) > 1:
        _wrong(caller, ValueError, "there must be as many sequences of queries as of keys", **cu_seqlens)


def pages(caller: str, q: Any, k: Any, v: Any, table: Any, batch: int) -> None:
    """Raise unless k (pages, page_size, Hkv, D), v (pages, page_size, Hkv, Dv) and block_table (B, …) fit together."""
    for name, t in (("k", k), ("v", v)):
        if not isinstance(t, Tensor) or t.dim() != 4:
            message = f"with block_table, {name} must be (pages, page_size, heads, head_dim)"
            _wrong(caller, ValueError, message, **{name: t}, block_table=table)
    if k.shape[:3] != v.shape[:3]:
        _wrong(caller, ValueError, "k and v must have the same pages, page_size and heads", k=k, v=v)
    if not _integers(table):
        _wrong(caller, TypeError, "block_table must be a tensor of integers", block_table=table)
    if table.dim() != 2 or len(table) != batch:
        _wrong(caller, ValueError, f"block_table must be (B, pages of each) = ({batch}, …)", q=q, block_table=table)
    if table.device != q.device:
        _wrong(caller, ValueError, "block_table must be on q's device: move it with .to(device)", block_table=table)


def rotary(caller: str, cos: Any, sin: Any, q: Tensor, k: Any) -> None:
    """Raise unless cos and sin are (positions, rotary_dim / 2), with rotary_dim at most head_dim."""
    given = {"rotary_cos": cos, "rotary_sin": sin}
    if k is None:
        _wrong(caller, ValueError, "rotary_cos and rotary_sin apply to new keys: pass k and v as well", **given)
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or not cos.is_floating_point():
        _wrong(caller, TypeError, "rotary_cos and rotary_sin must be floating-point tensors", **given)
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[-1] or not cos.shape[1]:
        message = "rotary_cos and rotary_sin must be (positions, rotary_dim / 2), rotary_dim at most head_dim"
        _wrong(caller, ValueError, message, q=q, **given)
    if cos.device != q.device or sin.device != q.device:
        _wrong(caller, ValueError, "rotary_cos and rotary_sin must be on q's device", q=q, **given)


def mask(caller: str, m: Any, q: Tensor, target: tuple[Any, ...]) -> None:
    """Raise unless m is a bool or floating-point tensor broadcastable to the target (B, Hq, queries, keys).

    Symbolic lengths of a traced graph are checked by the op. If the number of keys is None, any size is accepted, but
    the mask must have that dimension.
    """
    if not isinstance(m, Tensor) or not (m.dtype is torch.bool or m.is_floating_point()):
        _wrong(
            caller, TypeError, "attn_mask must be a tensor, bool (True = attend) or floating point (added)", attn_mask=m
        )
    refuse_subclass("attn_mask", m)
    pairs = list(zip(reversed(m.shape), reversed(target), strict=False))
    if (
        m.dim() > 4
        or (m.dim() == 0 and target[3] is None)
        or any(isinstance(b, int) and a not in (1, b) for a, b in pairs)
    ):
        shape = "(" + ", ".join("K" if size is None else str(size) for size in target) + ")"
        _wrong(
            caller, ValueError, f"attn_mask does not broadcast to (B, Hq, queries, keys) = {shape}", q=q, attn_mask=m
        )
    if m.device != q.device:
        _wrong(caller, ValueError, "attn_mask must be on q's device: move it with .to(device)", q=q, attn_mask=m)


def _integers(t: Any) -> bool:
    return isinstance(t, Tensor) and scalars.is_integral(t)


def packed_together(caller: str, name: str, t: Any, dimensions: int, parts: int) -> tuple[Tensor, ...]:
    """Return the parts of (…, parts, heads, head_dim), unbound along the third dimension from the end."""
    if not isinstance(t, Tensor):
        _wrong(caller, TypeError, f"{name} must be a tensor", **{name: t})
    if t.dim() != dimensions or t.shape[-3] != parts:
        shape = "(batch, length, " if dimensions == 5 else "(total, "
        _wrong(caller, ValueError, f"{name} must be {shape}{parts}, heads, head_dim)", **{name: t})
    return t.unbind(-3)


def bias(caller: str, b: Any, q: Tensor, batch: int) -> None:
    """Raise unless b is a number or a tensor (), (B,) or (B or 1, Hq or 1)."""
    heads = q.shape[-2]
    if isinstance(b, str):
        _wrong(caller, TypeError, 'sigmoid_bias must be a number, "-log n" or a tensor', sigmoid_bias=b)
    if not isinstance(b, Tensor):
        scalars.real(caller, 'sigmoid_bias, if neither a tensor nor "-log n",', b)
        return
    if not b.is_floating_point():
        _wrong(caller, TypeError, "sigmoid_bias must be floating point", sigmoid_bias=b)
    fits = b.dim() == 0 or tuple(b.shape) == (batch,) or (b.dim() == 2 and _broadcasts(b, batch, heads))
    if not fits:
        message = f"sigmoid_bias must be (), (B,) = ({batch},) or (B or 1, Hq or 1) = ({batch} or 1, {heads} or 1)"
        _wrong(caller, ValueError, message, sigmoid_bias=b)
    if b.device != q.device:
        _wrong(caller, ValueError, "sigmoid_bias must be on q's device: move it with .to(device)", q=q, sigmoid_bias=b)


def _broadcasts(b: Tensor, batch: int, heads: int) -> bool:
    return b.shape[0] in (1, batch) and b.shape[1] in (1, heads)


def slopes(caller: str, s: Any, q: Tensor, batch: int) -> None:
    """Raise unless s is (Hq,) or (B, Hq)."""
    heads = q.shape[-2]
    if not isinstance(s, Tensor) or not s.is_floating_point():
        _wrong(caller, TypeError, "alibi_slopes must be a floating-point tensor", alibi_slopes=s)
    if tuple(s.shape) not in {(heads,), (batch, heads)}:
        _wrong(caller, ValueError, f"alibi_slopes must be (Hq,) = ({heads},) or (B, Hq)", q=q, alibi_slopes=s)
    if s.device != q.device:
        _wrong(caller, ValueError, "alibi_slopes must be on q's device: move it with .to(device)", q=q, alibi_slopes=s)


def _check_operands(
    caller: str, q: Any, k: Any, v: Any, dimensions: int, layout: str, names: tuple[str, str, str] = ("q", "k", "v")
) -> None:
    given = dict(zip(names, (q, k, v), strict=True))
    _, key, value = names
    all_names = f"{names[0]}, {key} and {value}"
    for name, t in given.items():
        if not isinstance(t, Tensor):
            _wrong(caller, TypeError, f"{name} must be a tensor", **{name: t})
        if t.is_nested or t.layout is not torch.strided:
            _wrong(caller, TypeError, f"{name} must be a dense tensor", **{name: t.layout})
    if not (q.dim() == k.dim() == v.dim() == dimensions):
        _wrong(caller, ValueError, f"{all_names} must have {dimensions} dimensions, {layout}", **given)
    if not q.is_floating_point():
        _wrong(caller, TypeError, f"{all_names} must be floating point", **given)
    if not (q.dtype == k.dtype == v.dtype):
        _wrong(caller, TypeError, f"{all_names} must have one dtype: convert with .to(dtype)", **given)
    if not (q.device == k.device == v.device):
        _wrong(caller, ValueError, f"{all_names} must be on one device: move with .to(device)", **given)
    if q.shape[-1] != k.shape[-1]:
        _wrong(caller, ValueError, f"q and {key} must have the same head_dim (the last dimension)", **given)
    if k.shape[:-1] != v.shape[:-1]:
        _wrong(caller, ValueError, f"{key} and {value} must have the same batch size, length and heads", **given)
    if q.shape[-2] != k.shape[-2] and (not k.shape[-2] or q.shape[-2] % k.shape[-2]):
        _wrong(caller, ValueError, f"the heads of q must be a multiple of those of {key}", **given)
