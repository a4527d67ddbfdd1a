"""Fast path for one new token and few cached keys on a CPU in eager mode: three calls of PyTorch, little Python code.

The general implementation (``kvcache``) takes lengths, tables and biases as tensors, which compilation and export need.
With a few hundred keys, reading them takes several times as long as the arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sigattn.ops.cpu.matmul import keep_memory_warm

# measured on a CPU (docs/log.md)
FEW = 1 << 19  # elements of a sample's K up to which this path is faster than ``kvcache``, which splits long caches
COPIED = 1 << 16  # elements of a sample's K up to which samples are batched even if that requires copying their heads
_ONE = {dtype: torch.ones(1, 1, 1, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64)}


def attend(query: Tensor, key: Tensor, value: Tensor, bias: float, scale: float) -> Tensor:  # (B, 1, Hq, Dv)
    """Return the output of one query per sample, for CPU tensors without gradient.

    Args:
        query: (B, 1, Hq, D). key, value: (B, M, Hkv, D) and (B, M, Hkv, Dv), all visible to the query; M · Hkv · D at
            most ``FEW``.
        bias: b. scale: factor of Q Kᵀ.
    """
    batch, num_keys, key_heads, width = key.shape
    sample = num_keys * key_heads * width
    keep_memory_warm()
    together = FEW // sample if sample <= COPIED or (can_fold_heads(key) and can_fold_heads(value)) else 1
    if batch > together:
        parts = zip(*(t.split(together) for t in (query, key, value)), strict=True)
        return torch.cat([attend(q, k, v, bias, scale) for q, k, v in parts])
    heads = batch * key_heads
    q, k, v = query.reshape(heads, -1, width), _by_head(key, heads), _by_head(value, heads)
    dtype = query.dtype
    if dtype not in _ONE:
        q, k, v = q.float(), k.float(), v.float()
    weights = torch.baddbmm(_ONE[q.dtype], q, k.mT, beta=bias, alpha=scale).sigmoid_()  # (H, R, M)
    out = torch.bmm(weights, v).view(batch, 1, query.shape[2], -1)
    return out if out.dtype is dtype else out.to(dtype)


def can_fold_heads(t: Tensor) -> bool:
    """Return True if samples and heads of (B, M, H, E) are one dimension in memory (order (B, H, M, E))."""
    return t.stride(0) == t.shape[2] * t.stride(2)


def _by_head(t: Tensor, heads: int) -> Tensor:  # (B, M, H, E) → (B · H, M, E)
    batch, num_keys, key_heads, width = t.shape
    of_sample, of_key, of_head, of_feature = t.stride()
    if batch == 1 or of_sample == key_heads * of_head:
        return t.as_strided((heads, num_keys, width), (of_head, of_key, of_feature))
    return t.transpose(1, 2).reshape(heads, num_keys, width)
