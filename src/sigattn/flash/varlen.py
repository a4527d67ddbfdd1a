"""``flash_attn_varlen_func`` and its packed forms: sequences of different lengths, unpadded (``sigattn.flash``)."""

from __future__ import annotations

import torch
from torch import Tensor

from sigattn.flash import options
from sigattn.ops import flash_checks, library, packed
from sigattn.ops.attention import new_seed, sides, two_sided
from sigattn.ops.problem import PackedProblem
from sigattn.ops.settings import is_fast


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
    block_table: None = None,
    sigmoid_bias: float | str | Tensor = 0.0,
    sigmoid_precision: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Sigmoid attention of B sequences of different lengths, one after another without padding.

    Sequence s has the rows cu_seqlens[s] … cu_seqlens[s + 1] - 1. It may be empty; queries without keys give 0. What
    lies beyond the last sequence gives 0 and has gradient 0.

    Args:
        q: (total_q, Hq, D).
        k: (total_k, Hkv, D), Hq a multiple of Hkv.
        v: (total_k, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) integers on q's device, from 0, not descending. (Their values are checked
            on a CPU only: on an accelerator that would make the host wait.)
        max_seqlen_q, max_seqlen_k: the longest sequences' lengths; rows beyond them would be left out. Pass
            Python's integers: reading a tensor on an accelerator synchronises.
        block_table: must be None.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            ``flash_attn_func``, with each sequence's own N and M.
        sigmoid_bias, sigmoid_precision, backend: see ``sigattn.flash``; "-log n" is each sequence's own.

    Returns:
        (total_q, Hq, Dv), in q's dtype.

    Raises:
        ValueError, TypeError: as in ``flash_attn_func``.

    >>> q, k, v = torch.randn(3, 10, 4, 64).unbind()
    >>> starts = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, starts, starts, 7, 7, causal=True, sigmoid_bias="-log n").shape
    torch.Size([10, 4, 64])
    """
    name = "flash_attn_varlen_func"
    options.refuse(name, softcap, return_attn_probs)
    if block_table is not None:
        raise ValueError(f"{name}: block_table must be None: paged keys are not for variable lengths here")
    max_seqlen_q, max_seqlen_k = flash_checks.varlen(
        name, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    )
    batch = len(cu_seqlens_q) - 1
    dropout_p, softmax_scale, window = options.check(
        name, q, batch, dropout_p, softmax_scale, window_size, alibi_slopes, sigmoid_bias, backend
    )
    left, right = sides(window, causal)
    problem = PackedProblem(
        options.cast(q),
        options.cast(k),
        options.cast(v),
        options.packed_bias(sigmoid_bias),
        None if alibi_slopes is None else two_sided(alibi_slopes),
        cu_seqlens_q,
        cu_seqlens_k,
        new_seed(dropout_p),
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        left,
        right,
        dropout_p,
        is_fast(sigmoid_precision),
        deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    return packed.call(problem, library.choose(problem, backend))


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
) -> Tensor:
    """``flash_attn_varlen_func`` of qkv: (total, 3, H, D), with the same lengths for queries and keys."""
    q, k, v = flash_checks.packed_together("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs, None, sigmoid_bias, sigmoid_precision, backend,
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
) -> Tensor:
    """``flash_attn_varlen_func`` of q: (total_q, Hq, D) and kv: (total_k, 2, Hkv, D)."""
    k, v = flash_checks.packed_together("flash_attn_varlen_kvpacked_func", "kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs, None, sigmoid_bias, sigmoid_precision, backend,
    )  # fmt: skip
