"""A new token against few cached keys on a CPU, in eager mode: three calls of PyTorch's, and little of Python.

The general way (``cached``) takes lengths, tables and biases as tensors, which an op can be compiled and exported with.
At a few hundred keys reading them costs several times the arithmetic; softmax's SDPA is a single call there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sigattn.ops import library

FEW = 1 << 19  # elements of K: beyond, the general way is faster, which walks a cache in pieces (docs/log.md)
_ONE = {dtype: torch.ones(1, 1, 1, dtype=dtype) for dtype in (torch.float32, torch.float64)}


def attend(query: Tensor, key: Tensor, value: Tensor, bias: float, scale: float) -> Tensor | None:
    """The output (B, 1, Hq, Dv), or None where this is not the way: elsewhere, with many keys, or if someone watches.

    Args:
        query: (B, 1, Hq, D). key, value: (B, M, Hkv, D) and (B, M, Hkv, Dv), all of which the query sees.
        bias: b. scale: the factor of Q Kᵀ.
    """
    batch, keys, key_heads, width = key.shape
    few = 0 < keys * batch * key_heads * width <= FEW
    if not few or query.device.type != "cpu" or not library.nobody_watches((query, key, value)):
        return None
    if torch.compiler.is_compiling():
        return None
    heads = batch * key_heads
    q, k, v = query.reshape(heads, -1, width), _by_head(key, heads), _by_head(value, heads)
    if q.dtype not in _ONE:
        q, k, v = q.float(), k.float(), v.float()
    weights = torch.baddbmm(_ONE[q.dtype], q, k.mT, beta=bias, alpha=scale).sigmoid_()  # (H, R, M)
    out = torch.bmm(weights, v).view(batch, 1, -1, value.shape[3])
    return out if out.dtype is query.dtype else out.to(query.dtype)


def _by_head(t: Tensor, heads: int) -> Tensor:  # (B, M, Hkv, E) → (B · Hkv, M, E)
    batch, keys, key_heads, width = t.shape
    sample, place, head, feature = t.stride()
    if batch == 1 or sample == key_heads * head:
        return t.as_strided((heads, keys, width), (head, place, feature))
    return t.transpose(1, 2).reshape(heads, keys, width)
