"""``flash_attn_varlen_func`` and its packed forms: sequences of different lengths, unpadded (``sigattn.flash``)."""

from typing import Any

import torch
from torch import Tensor

from sigattn.flash import validation as flash_validation
from sigattn.ops import validation
from sigattn.ops.kvcache import check_cache_bounds
from sigattn.ops.problem import VarlenProblem, cast_operands, make_problem
from sigattn.ops.varlen import VARLEN, mask_target

_NAME = "flash_attn_varlen_func"


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    sigmoid_bias: float | Tensor | None = None, sigmoid_precision: str | None = None, backend: str | None = None,
    attn_mask: Tensor | None = None, normalize: bool = False,
) -> Tensor:  # fmt: skip
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
        sigmoid_bias, sigmoid_precision, backend, normalize: see ``sigattn.flash``.
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
    >>> flash_attn_varlen_func(q, k, v, starts, starts, 7, 7, causal=True).shape
    torch.Size([10, 4, 64])
    """
    flash_validation.refuse_weights(_NAME, return_attn_probs)
    max_q = validation.count(_NAME, "max_seqlen_q", max_seqlen_q)
    max_k = validation.count(_NAME, "max_seqlen_k", max_seqlen_k)
    if block_table is not None:
        k, v, cu_seqlens_k = _gather_pages(q, k, v, cu_seqlens_k, max_k, block_table)
    validation.operands(_NAME, validation.PACKED, q=q, k=k, v=v)
    validation.sequence_offsets(_NAME, q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    batch = cu_seqlens_q.shape[0] - 1
    options = flash_validation.options(
        _NAME, q, batch, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        sigmoid_bias, sigmoid_precision, backend, normalize,
    )  # fmt: skip
    if attn_mask is not None:
        validation.mask(_NAME, attn_mask, q, mask_target(batch, q.shape[1], max_q, max_k), query_name="q")
    q, k, v = cast_operands(q, k, v)
    problem = make_problem(
        VarlenProblem, q, k, v, attn_mask=attn_mask, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_q, max_seqlen_k=max_k, **options,
    )  # fmt: skip
    return VARLEN(problem, backend)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    sigmoid_bias: float | Tensor | None = None, sigmoid_precision: str | None = None, backend: str | None = None,
    attn_mask: Tensor | None = None, normalize: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``flash_attn_varlen_func`` of qkv, (total, 3, H, D), with the same lengths for queries and keys."""
    q, k, v = flash_validation.packed_together("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs, None, sigmoid_bias, sigmoid_precision, backend, attn_mask,
        normalize,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, sigmoid_bias: float | Tensor | None = None,
    sigmoid_precision: str | None = None, backend: str | None = None, attn_mask: Tensor | None = None,
    normalize: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``flash_attn_varlen_func`` of q, (total_q, Hq, D), and kv, (total_k, 2, Hkv, D)."""
    k, v = flash_validation.packed_together("flash_attn_varlen_kvpacked_func", "kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs, None, sigmoid_bias, sigmoid_precision, backend,
        attn_mask, normalize,
    )  # fmt: skip


def _gather_pages(q: Any, k: Any, v: Any, cu_seqlens_k: Any, longest: int, table: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys and values of the sequences, gathered from pages and concatenated, and their cu_seqlens.

    On an accelerator, where the sum of the lengths is not read, there are B · longest keys, the last arbitrary.
    """
    validation.tensors(_NAME, q=q, k=k, v=v)
    validation.sequence_offsets(_NAME, q, cu_seqlens_k=cu_seqlens_k)
    starts = cu_seqlens_k.long()
    batch = starts.shape[0] - 1
    flash_validation.pages(_NAME, q, k, v, table, batch)
    page_size = k.shape[1]
    check_cache_bounds(_NAME, starts.diff(), None, table, k.shape[0], page_size * table.shape[1])
    reads_values = starts.device.type == "cpu" and not torch.compiler.is_compiling()
    total = int(starts[-1]) if reads_values else batch * longest
    rows = torch.zeros(total, dtype=torch.int64, device=starts.device)
    if batch and table.shape[1]:
        index = torch.arange(total, device=starts.device)
        sequence = torch.searchsorted(starts[1:].contiguous(), index, right=True).clamp(max=batch - 1)
        offset = index - starts[sequence]
        page = table.long()[sequence, (offset // page_size).clamp(max=table.shape[1] - 1)]
        rows = torch.where(index < starts[-1], page * page_size + offset % page_size, 0)
    k, v = (t.flatten(0, 1).index_select(0, rows) for t in (k, v))
    return k, v, cu_seqlens_k.clamp(max=total)
