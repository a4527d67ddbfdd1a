"""Sigmoid attention with the functions and argument order of flash-attn 3 (its module ``flash_attn_interface``).

Change ``from flash_attn_interface import flash_attn_func`` into ``from sigattn.flash.v3 import flash_attn_func``.
Layouts, alignment, and the additional arguments at the end (``sigmoid_bias``, ``sigmoid_precision``, ``backend``,
``attn_mask``) are those of ``sigattn.flash``. As in flash-attn 3, there is neither dropout nor ALiBi.

``num_splits``, ``pack_gqa``, ``sm_margin`` and ``scheduler_metadata`` are hints about speed, which do not change the
result. Only ``num_splits`` of ``flash_attn_with_kvcache`` has an effect: the other kernels choose by themselves.
``q_descale``, ``k_descale`` and ``v_descale`` (float8 is not supported), ``qv`` (concatenate it to q, and v to k) and
``return_attn_probs`` / ``return_softmax_lse`` (a sigmoid has no log-sum-exp) raise a ValueError if given.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sigattn.flash import dense, kvcache, varlen
from sigattn.flash.options import Options, refuse
from sigattn.flash.rotary import Rotary
from sigattn.flash.validation import packed_together
from sigattn.ops import scalars, validation

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    sigmoid_bias: float | Tensor | None = None,
    sigmoid_precision: str | None = None,
    backend: str | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Compute sigmoid attention of a batch of sequences of one length.

    Args:
        q: (B, N, Hq, D). k: (B, M, Hkv, D). v: (B, M, Hkv, Dv).
        attention_chunk: c > 0: the query at position p = i + M - N sees only keys of its own chunk, from p - p mod c to
            p - p mod c + c - 1, by a mask of N · M entries. 0 for no chunks.
        num_splits, pack_gqa, sm_margin: hints; see the module.
        qv, q_descale, k_descale, v_descale: must be None.
        softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs: as in
            ``sigattn.flash.flash_attn_func``.
        sigmoid_bias, sigmoid_precision, backend, attn_mask: as there.

    Returns:
        Attention output, (B, N, Hq, Dv), contiguous, in q's dtype.

    Raises:
        ValueError, TypeError: as in ``sigattn.flash.flash_attn_func``, or for an argument that is not supported.

    >>> q, k, v = torch.randn(3, 2, 128, 4, 64).unbind()
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 128, 4, 64])
    """
    name = "flash_attn_func"
    _check(name, softmax_scale, causal, num_splits, pack_gqa, sm_margin, qv, q_descale, k_descale, v_descale)
    refuse(name, return_attn_probs)
    call_options = Options(
        0.0, softmax_scale, causal, window_size, softcap, None, deterministic, sigmoid_bias, sigmoid_precision, backend
    )
    return dense.attend(q, k, v, call_options, attn_mask, validation.count(name, "attention_chunk", attention_chunk))


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    sigmoid_bias: float | Tensor | None = None,
    sigmoid_precision: str | None = None,
    backend: str | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Compute ``flash_attn_func`` of qkv, (B, N, 3, H, D), or (B, N, Hq + 2 · Hkv, D) with num_heads_q = Hq."""
    name = "flash_attn_qkvpacked_func"
    if isinstance(qkv, Tensor) and qkv.dim() == 4:
        if num_heads_q is None:
            raise ValueError(f"{name}: qkv of four dimensions, (B, N, Hq + 2 · Hkv, D), needs num_heads_q")
        heads = scalars.integer(name, "num_heads_q", num_heads_q)
        rest = qkv.shape[2] - heads
        if heads < 0 or rest < 0 or rest % 2:
            raise ValueError(
                f"{name}: qkv must have num_heads_q + 2 · Hkv = {heads} + 2 · Hkv heads, got {qkv.shape[2]}"
            )
        q, k, v = qkv.split([heads, rest // 2, rest // 2], dim=2)
    else:
        q, k, v = packed_together(name, "qkv", qkv, 5, 3)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        1, None, deterministic, sm_margin, return_attn_probs, sigmoid_bias, sigmoid_precision, backend, attn_mask,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    sigmoid_bias: float | Tensor | None = None,
    sigmoid_precision: str | None = None,
    backend: str | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Compute sigmoid attention of B sequences of different lengths, concatenated without padding.

    Args:
        q: (total_q, Hq, D). k: (total_k, Hkv, D). v: (total_k, Hkv, Dv).
        seqused_q, seqused_k: (B,) integers, number of rows of each sequence that are used, from its first; None for
            all. The alignment and the default of sigmoid_bias count only used rows. Output and gradient of other rows
            are 0. The used rows are copied.
        attention_chunk: as in ``flash_attn_func``, by a mask of B · max_seqlen_q · max_seqlen_k entries.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in ``sigattn.flash.flash_attn_varlen_func``.
        The rest is as in ``flash_attn_func``.

    Returns:
        Attention output, (total_q, Hq, Dv), in q's dtype.

    Raises:
        ValueError, TypeError: as in ``flash_attn_func``.
    """
    name = "flash_attn_varlen_func"
    _check(name, softmax_scale, causal, num_splits, pack_gqa, sm_margin, qv, q_descale, k_descale, v_descale)
    refuse(name, return_attn_probs)
    call_options = Options(
        0.0, softmax_scale, causal, window_size, softcap, None, deterministic, sigmoid_bias, sigmoid_precision, backend
    )
    cu_seqlens, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    chunk = validation.count(name, "attention_chunk", attention_chunk)
    return varlen.attend(
        q, k, v, cu_seqlens, longest, call_options, attn_mask, seqused=(seqused_q, seqused_k), attention_chunk=chunk
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sigmoid_bias: float | Tensor | None = None,
    sigmoid_precision: str | None = None,
    backend: str | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Append new keys and values to a cache, in place, and compute sigmoid attention of new queries against the cache.

    Args:
        q: (B, N, Hq, D); or (total_q, Hq, D) with cu_seqlens_q (B + 1,) and max_seqlen_q, a different number of new
            queries for each sample.
        k, v: (B, N_new, Hkv, ·); or (total_new, Hkv, ·) with cu_seqlens_k_new (B + 1,), which ends at total_new; or
            None.
        page_table: (B, pages of each), named block_table in ``sigattn.flash``.
        rotary_seqlens: (B,) integers, the position of each sample's first new query and key in the rotary tables; None
            for cache_seqlens.
        attention_chunk: c > 0: a query sees only keys of its own chunk of c, counted from cache_leftpad; by a mask of
            B · N · capacity entries unless N is 1. Not with attn_mask.
        attn_mask: as in ``sigattn.flash.flash_attn_with_kvcache``; with cu_seqlens_q, N is max_seqlen_q, and a sample's
            first query has the first row.
        qv, q_descale, k_descale, v_descale: must be None.
        scheduler_metadata, pack_gqa, sm_margin: hints; see the module.
        The rest is as in ``sigattn.flash.flash_attn_with_kvcache``.

    Returns:
        Attention output, (B, N, Hq, Dv) or (total_q, Hq, Dv), in q's dtype.

    Raises:
        ValueError, TypeError, RuntimeError: as in ``sigattn.flash.flash_attn_with_kvcache``, or for an argument that is
            not supported.
    """
    name = "flash_attn_with_kvcache"
    _check(name, softmax_scale, causal, num_splits, pack_gqa, sm_margin, qv, q_descale, k_descale, v_descale)
    chunk = validation.count(name, "attention_chunk", attention_chunk)
    if cu_seqlens_q is None and cu_seqlens_k_new is None and rotary_seqlens is None and not chunk:
        return kvcache.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
            page_table, softmax_scale, causal, window_size, softcap, rotary_interleaved, None, num_splits,
            return_softmax_lse, sigmoid_bias, sigmoid_precision, backend, attn_mask,
        )  # fmt: skip
    kvcache.refuse(return_softmax_lse)
    call_options = Options(
        0.0, softmax_scale, causal, window_size, softcap, None, False, sigmoid_bias, sigmoid_precision, backend
    )
    return kvcache.attend(
        q, k_cache, v_cache, k, v, call_options, Rotary(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens),
        cache_seqlens, cache_batch_idx, cache_leftpad, page_table, num_splits, attn_mask,
        packed=kvcache.Packing(cu_seqlens_q, max_seqlen_q, cu_seqlens_k_new), attention_chunk=chunk,
    )  # fmt: skip


def _check(
    name: str, softmax_scale: Any, causal: Any, num_splits: Any, pack_gqa: Any, sm_margin: Any, qv: Any, *descale: Any
) -> None:
    """Raise if arguments seem to be in flash-attn 2's order, with dropout_p before softmax_scale, or do not apply."""
    if isinstance(softmax_scale, bool) or not isinstance(causal, bool):
        raise TypeError(
            f"{name}: softmax_scale must be a number and causal a bool, got {softmax_scale!r} and {causal!r}; "
            "flash-attn 2's order (…, dropout_p, softmax_scale, causal, …) is that of sigattn.flash"
        )
    if qv is not None:
        raise ValueError(f"{name}: qv must be None: concatenate it to q, and v to k")
    for argument, value in zip(("q_descale", "k_descale", "v_descale"), descale, strict=True):
        if value is not None:
            raise ValueError(f"{name}: {argument} must be None: float8 is not supported")
    validation.count(name, "num_splits", num_splits)
    validation.count(name, "sm_margin", sm_margin)
    if pack_gqa is not None:
        validation.flag(name, "pack_gqa", pack_gqa)
