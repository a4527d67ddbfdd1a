"""Attention with a cache of keys and values, for a CPU and for devices without a kernel.

Partial results over disjoint keys add, so that a long cache is processed in pieces without rescaling (Sect. 4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sigattn.ops.cpu import blocked, decode
from sigattn.ops.cpu.matmul import fused_unavailable
from sigattn.ops.problem import UNLIMITED, KVCacheProblem, Problem

# measured on a CPU (docs/log.md)
TOGETHER = 1 << 20  # elements of K up to which samples are batched; more would exceed the processor's cache
PIECE = 1 << 19  # elements of K processed at a time, so that converted keys are still in the processor's cache
BY_HEAD_FROM = 2048  # number of keys from which bfloat16 products are computed without conversion, one head at a time


def forward(problem: KVCacheProblem) -> Tensor:  # (B, N, Hq, Dv)
    """Return the output of sigmoid attention."""
    p = problem
    (batch, n, heads, _), (_, _, key_heads, width) = p.query.shape, p.key.shape
    shape = batch, n, heads, p.value.shape[3]
    if 0 in shape:
        return p.query.new_empty(shape)
    lengths = p.seqlens.tolist()
    firsts = [0] * batch if p.left_padding is None else p.left_padding.tolist()
    ends = lengths if p.query_ends is None else p.query_ends.tolist()
    one_query = n == 1 and p.attn_mask is None
    together = batch == 1
    if one_query and not together and p.block_table is None and not any(firsts) and len(p.key) == batch:
        alike = len(set(lengths)) == len(set(ends)) == 1 and batch * lengths[0] * key_heads * width <= TOGETHER
        together = alike and decode.can_fold_heads(p.key) and decode.can_fold_heads(p.value)
    if one_query and together:
        return _one_query(p, slice(0, batch), firsts[0], lengths[0], ends[0] - 1)
    out = p.query.new_empty(shape)
    for b, (first, length, end) in enumerate(zip(firsts, lengths, ends, strict=True)):
        if one_query:
            out[b] = _one_query(p, slice(b, b + 1), first, length, end - 1)
        else:
            out[b] = blocked.forward(_dense(p, b, first, length, end))[0].transpose(0, 1)
    return out


def _keys(p: KVCacheProblem, cache: Tensor, samples: slice, first: int, stop: int) -> Tensor:
    """Return samples' keys or values, (H, stop - first, E) for H key heads, as a view unless they are in several pages.

    With a table of pages there must be a single sample.
    """
    if p.block_table is None:
        return cache[samples, first:stop].transpose(1, 2).flatten(0, 1)
    page = cache.shape[1]
    start = first // page
    named = p.block_table[samples.start, start : -(-stop // page)] if stop > first else p.block_table[0, :0]
    pages = cache[int(named)] if len(named) == 1 else cache.index_select(0, named).flatten(0, 1)
    return pages[first - start * page : max(stop, first) - start * page].transpose(0, 1)


def _of(t: Tensor, samples: slice) -> Tensor:
    return t if t.shape[0] == 1 else t[samples]


def _dense(p: KVCacheProblem, b: int, first: int, length: int, end: int) -> Problem:
    """Return a sample as a problem without a cache."""
    key, value = (_keys(p, cache, slice(b, b + 1), first, length).unsqueeze(0) for cache in (p.key, p.value))
    return Problem(
        p.query[b : b + 1].transpose(1, 2),
        key,
        value,
        p.bias if p.bias.dim() == 0 else _of(p.bias, slice(b, b + 1)),
        _mask_of(p, b, length - first),
        alibi_slopes=None if p.alibi_slopes is None else _of(p.alibi_slopes, slice(b, b + 1)),
        scale=p.scale,
        left=p.left,
        right=p.right,
        query_offset=end - p.query.shape[1] - first,
        softcap=p.softcap,
    )


def _mask_of(p: KVCacheProblem, b: int, num_keys: int) -> Tensor | None:  # (1, Hq or 1, N or 1, num_keys)
    """Return the mask of all keys of a sample, given that of its last keys."""
    if p.attn_mask is None:
        return None
    mask = _of(p.attn_mask, slice(b, b + 1))[..., max(p.attn_mask.shape[3] - max(num_keys, 0), 0) :]
    visible = 1.0 if mask.dtype is torch.bool else 0.0
    return torch.nn.functional.pad(mask, (max(num_keys, 0) - mask.shape[3], 0), value=visible)


def _one_query(p: KVCacheProblem, samples: slice, first: int, length: int, position: int) -> Tensor:
    """Return the outputs (B', 1, Hq, Dv) of samples of one length with a single query each, the case of decoding."""
    begin = first if p.left == UNLIMITED else max(first, position - p.left)
    stop = length if p.right == UNLIMITED else min(length, position + p.right + 1)
    begin = min(begin, max(stop, first))
    batch, (_, _, key_heads, width) = samples.stop - samples.start, p.key.shape
    group, wide = p.query.shape[2] // key_heads, torch.promote_types(p.query.dtype, torch.float32)

    def by_key_head(t: Tensor) -> Tensor:  # (B or 1, Hq or 1) → (H, R, 1): H key heads, R query heads of each
        return t.expand(batch, p.query.shape[2]).reshape(-1, group, 1).to(wide)

    bias = p.bias.item() if p.bias.dim() == 0 else by_key_head(_of(p.bias, samples)[..., 0, 0])
    slopes = None if p.alibi_slopes is None else by_key_head(_of(p.alibi_slopes, samples)[..., 0])
    # a number is added inside the product, where it is not rounded to 16 bits
    added = bias if slopes is None and not isinstance(bias, Tensor) and not p.softcap else 0.0
    own = p.query.dtype is torch.bfloat16 and fused_unavailable(p.query.device, torch.bfloat16) is None
    paged = p.block_table is not None and p.block_table.shape[1] > 1
    by_head = own and stop - begin >= BY_HEAD_FROM and not paged and not p.softcap
    dtype = p.query.dtype if by_head else wide
    query, scale = p.query[samples].reshape(batch * key_heads, group, -1).to(dtype), p.scale_value  # (H, R, D)
    if scale == 0:  # not as alpha, with which oneDNN computes neither a product nor its bias
        query, scale = query * 0, 1.0  # NaN stays NaN
    piece = max(stop - begin, 1) if by_head else max(PIECE // max(key_heads * width * batch, 1), 64)
    total: Tensor | None = None  # (H, R, Dv)
    for start in range(begin, stop, piece):
        key, value = (_keys(p, t, samples, start, min(start + piece, stop)).to(dtype) for t in (p.key, p.value))
        one = query.new_ones(1, 1, 1)
        if by_head:
            heads = zip(query, key.mT, strict=True)
            logits = torch.stack([torch.addmm(one[0], q, k, beta=added, alpha=scale) for q, k in heads])
        else:
            logits = torch.baddbmm(one, query, key.mT, beta=added, alpha=scale)  # (H, R, C)
        if p.softcap:
            logits = logits.div_(p.softcap).tanh_().mul_(p.softcap)
        if slopes is not None:
            distance = (position - torch.arange(start, start + key.shape[1], device=key.device)).abs()
            logits = logits.to(wide).add_(bias - slopes * distance)
        elif isinstance(bias, Tensor) or p.softcap:
            logits = logits.to(wide).add_(bias)
        weights = logits.sigmoid_().to(dtype)
        part = torch.stack([w @ v for w, v in zip(weights, value, strict=True)]) if by_head else weights @ value
        total = part if total is None else total.to(wide).add_(part)
    if total is None:
        total = query.new_zeros(*query.shape[:2], p.value.shape[3])
    return total.to(p.query.dtype).view(batch, 1, p.query.shape[2], -1)
