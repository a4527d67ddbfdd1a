"""Fast path for one new token and few cached keys on a CPU in eager mode: three calls of PyTorch, or backend "llvm".

The general implementation (``kvcache``) takes lengths, tables and biases as tensors, which compilation and export need.
With a few hundred keys, reading them takes several times as long as the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sigattn.ops import llvm
from sigattn.ops.cpu.matmul import keep_memory_warm
from sigattn.ops.problem import Problem

# measured on a CPU (docs/log.md)
FEW = 1 << 19  # elements of a sample's K up to which this path is faster than ``kvcache``, which splits long caches
KERNELS_FROM, KERNEL_WORK = 32, 1 << 17  # keys, and elements of all K, from which the backend "llvm" is faster
MOST = 1 << 20  # elements of a sample's K up to which it is faster than ``kvcache``
PACKED = 1 << 20  # elements of K that it packs in one call
COPIED = 1 << 16  # elements of a sample's K up to which samples are batched even if that requires copying their heads
_ONE = {dtype: torch.ones(1, 1, 1, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64)}


def is_faster(query: Tensor, key: Tensor, value: Tensor, num_keys: int) -> bool:
    """Return True if ``attend`` is faster than ``kvcache`` for some keys of a cache, (B, M, Hkv, …)."""
    sample = num_keys * key.shape[2] * key.shape[3]
    return sample <= FEW or (sample <= MOST and _has_kernels(query, key, value))


def attend(query: Tensor, key: Tensor, value: Tensor, bias: float, scale: float) -> Tensor:  # (B, 1, Hq, Dv)
    """Return the output of one query per sample, for CPU tensors without gradient.

    Args:
        query: (B, 1, Hq, D). key, value: (B, M, Hkv, D) and (B, M, Hkv, Dv), all visible to the query, and few enough
            that ``is_faster``.
        bias: b. scale: factor of Q Kᵀ.
    """
    batch, num_keys, key_heads, width = key.shape
    sample = num_keys * key_heads * width
    if num_keys >= KERNELS_FROM and batch * sample >= KERNEL_WORK and _has_kernels(query, key, value):
        together = max(1, PACKED // sample)
        function: Callable[..., Tensor] = _by_kernels
    else:
        keep_memory_warm()
        can_be_batched = sample <= COPIED or (can_fold_heads(key) and can_fold_heads(value))
        together = FEW // sample if can_be_batched else 1
        function = _by_products
    if batch <= together:
        return function(query, key, value, bias, scale)
    parts = zip(*(t.split(together) for t in (query, key, value)), strict=True)
    return torch.cat([function(q, k, v, bias, scale) for q, k, v in parts])


def _by_products(query: Tensor, key: Tensor, value: Tensor, bias: float, scale: float) -> Tensor:
    """Return ``attend`` by batched products of PyTorch."""
    batch, _, key_heads, width = key.shape
    heads = batch * key_heads
    q, k, v = query.reshape(heads, -1, width), _by_head(key, heads), _by_head(value, heads)
    dtype = query.dtype
    if dtype not in _ONE:
        q, k, v = q.float(), k.float(), v.float()
    weights = torch.baddbmm(_ONE[q.dtype], q, k.mT, beta=bias, alpha=scale).sigmoid_()  # (H, R, M)
    out = torch.bmm(weights, v).view(batch, 1, query.shape[2], -1)
    return out if out.dtype is dtype else out.to(dtype)


def _has_kernels(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if the backend "llvm" is the default for a call."""
    problem = _grouped(query, key, value)
    return llvm.can_be_default(problem) and llvm.unavailable(problem) is None


def _by_kernels(query: Tensor, key: Tensor, value: Tensor, bias: float, scale: float) -> Tensor:
    """Return ``attend`` by the backend "llvm"."""
    number = torch.full((), bias, dtype=torch.float64, device="cpu")
    out = llvm.forward(_grouped(query, key, value)._replace(bias=number, scale=scale))
    return out.view(len(query), 1, query.shape[2], -1)


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> Problem:
    """Return the call as a problem in which the query heads of a key head are queries of one head."""
    queries = query.reshape(len(query), key.shape[2], -1, query.shape[3])
    return Problem(queries, key.transpose(1, 2), value.transpose(1, 2))


def can_fold_heads(t: Tensor) -> bool:
    """Return True if samples and heads of (B, M, H, E) are one dimension in memory (order (B, H, M, E))."""
    return t.stride(0) == t.shape[2] * t.stride(2)


def _by_head(t: Tensor, heads: int) -> Tensor:  # (B, M, H, E) → (B · H, M, E)
    batch, num_keys, key_heads, width = t.shape
    of_sample, of_key, of_head, of_feature = t.stride()
    if batch == 1 or of_sample == key_heads * of_head:
        return t.as_strided((heads, num_keys, width), (of_head, of_key, of_feature))
    return t.transpose(1, 2).reshape(heads, num_keys, width)
