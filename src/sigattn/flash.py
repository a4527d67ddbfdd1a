"""The second face: sigmoid attention under flash-attn's names, argument for argument those of flash-attn 2.8.

Change ``from flash_attn import flash_attn_func`` into ``from sigattn.flash import flash_attn_func``, and the weights
are σ(softmax_scale · Q Kᵀ + sigmoid_bias) instead of a softmax. Layouts are flash-attn's, (batch, length, heads,
head_dim) and packed (total, heads, head_dim); so is the alignment: the last query stands beside the last key, for
causality, windows and ALiBi. Fewer key/value heads than query heads are shared, as there.

Every function takes three arguments more, the last:

    sigmoid_bias: b. A number; "-log n", the paper's rule (App. E), n being the number of keys of the sample or
        sequence; or a floating-point tensor, with gradient: 0-d, (B,) one per sample or sequence, or (B or 1, Hq or
        1). It is 0 from the start, as in the paper's own kernel: say "-log n" unless the model was trained otherwise.
        (``flash_attn_with_kvcache`` has neither default nor rule.)
    sigmoid_precision: "accurate" or "fast"; None is what ``sigattn.set_sigmoid_precision`` said.
    backend: "triton" or "blocked"; None picks the fastest that can serve the call. On a CPU that is "blocked".

What cannot mean anything for a sigmoid is refused: ``softcap`` (σ is bounded), ``return_attn_probs`` (there is no
log-sum-exp; ``sigattn.attention_statistics`` has what it is mostly looked at for).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sigattn.flash_kvcache import flash_attn_with_kvcache
from sigattn.ops import checks, flash_checks, library, packed
from sigattn.ops.attention import autocast, bias_operand, canonical, new_seed, sides, two_sided
from sigattn.ops.problem import PackedProblem, Problem
from sigattn.ops.settings import is_fast

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

LOG_LENGTH = "-log n"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """Sigmoid attention of a batch of sequences of one length.

    Args:
        q: (B, N, Hq, D).
        k: (B, M, Hkv, D), Hq a multiple of Hkv.
        v: (B, M, Hkv, Dv).
        dropout_p: probability in [0, 1) of dropping a weight; pass 0 when not training.
        softmax_scale: factor of Q Kᵀ (the name is flash-attn's); None for D^-1/2.
        causal: query i sees keys j ≤ i + M - N.
        window_size: (left, right): query i sees keys i + M - N - left … i + M - N + right; -1 is unlimited.
        softcap: must be 0.
        alibi_slopes: (Hq,) or (B, Hq): slope · |i + M - N - j| is taken from the logits. With gradient.
        deterministic: whether the backward pass must repeat bitwise, also where PyTorch is not told so.
        return_attn_probs: must be False.
        sigmoid_bias, sigmoid_precision, backend: see ``sigattn.flash``.

    Returns:
        (B, N, Hq, Dv), contiguous, in q's dtype.

    Raises:
        ValueError: shapes, devices or values that do not fit, or an argument that has no meaning here.
        TypeError: an argument of the wrong type, or tensors of mixed or unsupported dtypes.

    >>> q, k, v = torch.randn(3, 2, 128, 4, 64).unbind()
    >>> flash_attn_func(q, k, v, causal=True, sigmoid_bias="-log n").shape
    torch.Size([2, 128, 4, 64])
    """
    name = "flash_attn_func"
    _refuse(name, softcap, return_attn_probs)
    flash_checks.dense(name, q, k, v)
    batch, heads = q.shape[0], q.shape[2]
    _options(name, q, batch, dropout_p, softmax_scale, window_size, alibi_slopes, sigmoid_bias, backend)
    query, key, value = (_cast(t).transpose(1, 2) for t in (q, k, v))
    problem = canonical(
        query,
        key,
        value,
        None,
        dropout_p,
        causal,
        softmax_scale,
        _dense_bias(sigmoid_bias, batch, heads),
        (window_size[0], window_size[1]),
        alibi_slopes,
        first_row=k.shape[1] - q.shape[1],
        fast=is_fast(sigmoid_precision),
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    return _run(problem, backend).transpose(1, 2).contiguous()


def flash_attn_qkvpacked_func(
    qkv: Tensor,
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
    """``flash_attn_func`` of qkv: (B, N, 3, H, D)."""
    q, k, v = flash_checks.packed_together("flash_attn_qkvpacked_func", "qkv", qkv, 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sigmoid_bias, sigmoid_precision, backend,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
    """``flash_attn_func`` of q: (B, N, Hq, D) and kv: (B, M, 2, Hkv, D)."""
    k, v = flash_checks.packed_together("flash_attn_kvpacked_func", "kv", kv, 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sigmoid_bias, sigmoid_precision, backend,
    )  # fmt: skip


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
        max_seqlen_q, max_seqlen_k: the longest sequences' lengths; rows beyond them would be left out.
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
    _refuse(name, softcap, return_attn_probs)
    if block_table is not None:
        raise ValueError(f"{name}: block_table must be None: paged keys are not for variable lengths here")
    flash_checks.varlen(name, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    batch = len(cu_seqlens_q) - 1
    _options(name, q, batch, dropout_p, softmax_scale, window_size, alibi_slopes, sigmoid_bias, backend)
    left, right = sides((window_size[0], window_size[1]), causal)
    problem = PackedProblem(
        _cast(q),
        _cast(k),
        _cast(v),
        _bias(sigmoid_bias),
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


def _refuse(name: str, softcap: float, return_attn_probs: bool) -> None:
    if softcap:
        raise ValueError(f"{name}: softcap={softcap} has no meaning for sigmoid weights, which are bounded; pass 0")
    if return_attn_probs:
        raise ValueError(
            f"{name}: return_attn_probs=True is not to be had: a sigmoid has no log-sum-exp, and the weights are never "
            "formed; see sigattn.attention_statistics"
        )


def _options(
    name: str,
    q: Tensor,
    batch: int,
    dropout_p: Any,
    scale: Any,
    window: Any,
    slopes: Any,
    bias: Any,
    backend: Any,
) -> None:
    checks.choice("backend", backend, tuple(library.KERNELS), name)
    checks.numbers(name, dropout_p, scale, window)
    if not (isinstance(bias, str) and bias == LOG_LENGTH):
        flash_checks.bias(name, bias, q, batch)
    if slopes is not None:
        flash_checks.slopes(name, slopes, q, batch)


def _cast(t: Tensor) -> Tensor:
    return autocast(t) if library.autocasting(t.device.type) else t


def _bias(bias: float | str | Tensor) -> Tensor | None:
    """None for the rule, 0-d for a number, or (B or 1, Hq or 1)."""
    if isinstance(bias, str):
        return None
    if not isinstance(bias, Tensor):
        return bias_operand(bias)
    return bias.reshape(1, 1) if bias.dim() == 0 else bias.unsqueeze(-1) if bias.dim() == 1 else bias


def _dense_bias(bias: float | str | Tensor, batch: int, heads: int) -> float | Tensor | None:
    """The same as ``sigmoid_attention`` takes it."""
    if not isinstance(bias, Tensor):
        return None if isinstance(bias, str) else bias
    b = _bias(bias)
    assert b is not None
    return b[..., None, None]


def _run(problem: Problem, backend: str | None) -> Tensor:
    return library.call(problem, library.choose(problem, backend))
