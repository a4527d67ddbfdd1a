"""``flash_attn_varlen_func`` and its packed forms: sequences of different lengths, unpadded (``sigattn.flash``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sigattn.flash import chunks, options, packing
from sigattn.flash.validation import packed_together
from sigattn.ops import validation
from sigattn.ops.autocast import cast_operands
from sigattn.ops.varlen import VARLEN, checked_varlen_attention, mask_target


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    sigmoid_bias: float | str | Tensor = 0.0,
    sigmoid_precision: str | None = None,
    backend: str | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Compute sigmoid attention of B sequences of different lengths, concatenated without padding.

    Sequence s has the rows cu_seqlens[s] … cu_seqlens[s + 1] - 1. It may be empty. The output of queries without keys
    is 0; output and gradient of rows beyond the last sequence are 0.

    Args:
        q: (total_q, Hq, D).
        k: (total_k, Hkv, D), Hq a multiple of Hkv.
        v: (total_k, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) integers on q's device, from 0, not decreasing. (Their values are checked
            on a CPU only: on an accelerator reading them would synchronise.)
        max_seqlen_q, max_seqlen_k: lengths of the longest sequences; longer sequences would be cut. Pass Python
            integers: reading a tensor on an accelerator synchronises.
        block_table: (B, pages of each) integers: k and v are then (pages, page_size, Hkv, ·), pages of any size, and
            sequence s has cu_seqlens_k[s + 1] - cu_seqlens_k[s] keys in the pages of row s. Keys and values are copied,
            which suits prefill; for decoding see ``flash_attn_with_kvcache``. With gradient.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            ``flash_attn_func``, with each sequence's own N and M.
        sigmoid_bias, sigmoid_precision, backend: see ``sigattn.flash``; "-log n" is each sequence's own.
        attn_mask: bool (True = attend) or floating point (added to the logits, with gradient), broadcastable to (B, Hq,
            max_seqlen_q, max_seqlen_k): entry [s, h, i, j] is for query i and key j of sequence s, counted from the
            sequence's first. It combines with causal and window_size. A tree of draft tokens, for example, is a mask
            whose rows allow a token's ancestors.

    Returns:
        Attention output, (total_q, Hq, Dv), in q's dtype.

    Raises:
        ValueError, TypeError: as in ``flash_attn_func``.

    >>> q, k, v = torch.randn(3, 10, 4, 64).unbind()
    >>> starts = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, starts, starts, 7, 7, causal=True, sigmoid_bias="-log n").shape
    torch.Size([10, 4, 64])
    """
    return attend(
        "flash_attn_varlen_func", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table,
        sigmoid_bias, sigmoid_precision, backend, attn_mask,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    sigmoid_bias: float | str | Tensor = 0.0,
    sigmoid_precision: str | None = None,
    backend: str | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Compute ``flash_attn_varlen_func`` of qkv, (total, 3, H, D), with the same lengths for queries and keys."""
    q, k, v = packed_together("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs, None, sigmoid_bias, sigmoid_precision, backend, attn_mask,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    sigmoid_bias: float | str | Tensor = 0.0,
    sigmoid_precision: str | None = None,
    backend: str | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Compute ``flash_attn_varlen_func`` of q, (total_q, Hq, D), and kv, (total_k, 2, Hkv, D)."""
    k, v = packed_together("flash_attn_varlen_kvpacked_func", "kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs, None, sigmoid_bias, sigmoid_precision, backend,
        attn_mask,
    )  # fmt: skip


def attend(
    name: str,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: Any,
    softmax_scale: Any,
    causal: bool,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    deterministic: bool,
    return_attn_probs: bool,
    block_table: Any,
    sigmoid_bias: Any,
    sigmoid_precision: str | None,
    backend: str | None,
    attn_mask: Any = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    attention_chunk: int = 0,
) -> Tensor:
    """Return the attention of packed sequences, for the functions of several versions of flash-attn.

    Args:
        name: name of the function, for error messages.
        seqused_q, seqused_k: (B,) integers, number of rows of each sequence that are used, from its first; None for
            all. The output of other rows is 0.
        attention_chunk: c > 0: a query sees only keys of its own chunk of c, by a mask of B · max_seqlen_q ·
            max_seqlen_k entries.
        The rest is as in ``flash_attn_varlen_func``.
    """
    options.refuse(name, return_attn_probs)
    softcap = validation.softcap(name, softcap)
    if block_table is not None:
        k, v, cu_seqlens_k = _from_pages(name, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, block_table)
    validation.operands(name, validation.PACKED, q=q, k=k, v=v)
    validation.sequence_offsets(name, q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    max_seqlen_q = validation.count(name, "max_seqlen_q", max_seqlen_q)
    max_seqlen_k = validation.count(name, "max_seqlen_k", max_seqlen_k)
    batch = len(cu_seqlens_q) - 1
    dropout_p, softmax_scale, window = options.check(
        name, q, batch, dropout_p, softmax_scale, window_size, alibi_slopes, sigmoid_bias, backend, VARLEN.backends
    )
    if attn_mask is not None:
        validation.mask(name, attn_mask, q, mask_target(batch, q.shape[1], max_seqlen_q, max_seqlen_k))
    q, k, v = cast_operands(q, k, v)
    order = None
    for which, used, cu_seqlens in (("seqused_q", seqused_q, cu_seqlens_q), ("seqused_k", seqused_k, cu_seqlens_k)):
        packing.check_used(name, which, used, cu_seqlens)
    if seqused_q is not None:
        order, cu_seqlens_q = packing.used_first(cu_seqlens_q, seqused_q, len(q))
        q = q.index_select(0, order)
    if seqused_k is not None:
        used_keys, cu_seqlens_k = packing.used_first(cu_seqlens_k, seqused_k, len(k))
        k, v = (t.index_select(0, used_keys) for t in (k, v))
    if attention_chunk:
        chunk_mask = chunks.packed(cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), attention_chunk)
        attn_mask = chunks.combined(chunk_mask, attn_mask)
    out = checked_varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        scale=softmax_scale,
        window=window,
        is_causal=causal,
        bias=None if isinstance(sigmoid_bias, str) else options.operator_bias(sigmoid_bias),
        attn_mask=attn_mask,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        softcap=softcap,
        backend=backend,
        precision=sigmoid_precision,
        deterministic=deterministic,
    )
    return out if order is None else packing.restore(out, order)


def _from_pages(
    name: str, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_k: Any, table: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys and values of concatenated sequences, gathered from pages, and their cu_seqlens."""
    validation.sequence_offsets(name, q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    packing.check_pages(name, q, k, v, table, cu_seqlens_k.diff())
    longest = validation.count(name, "max_seqlen_k", max_seqlen_k)
    rows = packing.rows_of_pages(cu_seqlens_k, table, k.shape[1], longest)
    k, v = (t.flatten(0, 1).index_select(0, rows) for t in (k, v))
    return k, v, cu_seqlens_k.clamp(max=len(rows))
