"""Attention with a cache of keys and values, for a CPU and for devices without a kernel.

Partial results over disjoint keys add, so that a long cache is processed in pieces without rescaling (Sect. 4).
"""

from __future__ import annotations

from collections.abc import Iterator

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
    (batch, n, heads, _), dv = p.query.shape, p.value.shape[3]
    out = p.query.new_empty(batch, n, heads, dv)
    if not out.numel():
        return out
    lengths = p.seqlens.tolist()
    firsts = [0] * batch if p.left_padding is None else p.left_padding.tolist()
    ends = lengths if p.query_ends is None else p.query_ends.tolist()
    together = n == 1 and p.attn_mask is None and batch > 1 and p.block_table is None and not any(firsts)
    together = together and len(set(lengths)) == len(set(ends)) == 1 and len(p.key) == batch
    together = together and decode.can_fold_heads(p.key) and decode.can_fold_heads(p.value)
    if together and batch * lengths[0] * p.key.shape[2] * p.key.shape[3] <= TOGETHER:
        _one_query(p, slice(0, batch), firsts[0], lengths[0], ends[0] - 1, out)
        return out
    for b, (first, length, end) in enumerate(zip(firsts, lengths, ends, strict=True)):
        if n == 1 and p.attn_mask is None:
            _one_query(p, slice(b, b + 1), first, length, end - 1, out)
        else:
            out[b] = blocked.forward(_dense(p, b, first, length, end))[0].transpose(0, 1)
    return out


def _keys(p: KVCacheProblem, cache: Tensor, b: int, first: int, stop: int) -> Tensor:  # (stop - first, Hkv, E)
    """Return a sample's keys or values, as a view if they are in one page, else as a copy."""
    page = cache.shape[1]
    if stop <= first:
        return cache[0, :0]
    if p.block_table is None:
        return cache[b, first:stop]
    start = first // page
    named = p.block_table[b, start : -(-stop // page)]
    inside = slice(first - start * page, stop - start * page)
    if len(named) == 1:
        return cache[int(named), inside]
    return cache.index_select(0, named).flatten(0, 1)[inside]


def _of(t: Tensor, samples: slice) -> Tensor:
    return t if len(t) == 1 else t[samples]


def _dense(p: KVCacheProblem, b: int, first: int, length: int, end: int) -> Problem:
    """Return a sample as a problem without a cache."""
    key, value = (_keys(p, cache, b, first, length).transpose(0, 1).unsqueeze(0) for cache in (p.key, p.value))
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


def _one_query(p: KVCacheProblem, samples: slice, first: int, length: int, position: int, out: Tensor) -> None:
    """Compute the outputs of samples of one length with a single query each, the case of decoding, into ``out``."""
    begin = first if p.left == UNLIMITED else max(first, position - p.left)
    stop = length if p.right == UNLIMITED else min(length, position + p.right + 1)
    begin = min(begin, max(stop, first))
    batch, group = samples.stop - samples.start, p.query.shape[2] // p.key.shape[2]

    def by_key_head(t: Tensor) -> Tensor:  # (B or 1, Hq or 1) → (H, R, 1): H key heads, R query heads of each
        return t.expand(batch, p.query.shape[2]).reshape(-1, group, 1).to(wide)

    wide = torch.promote_types(p.query.dtype, torch.float32)
    bias = p.bias.item() if p.bias.dim() == 0 else by_key_head(_of(p.bias, samples)[..., 0, 0])
    slopes = None if p.alibi_slopes is None else by_key_head(_of(p.alibi_slopes, samples)[..., 0])
    query = p.query[samples].reshape(batch * p.key.shape[2], group, -1)  # (H, R, D)
    total = query.new_zeros(*query.shape[:2], p.value.shape[3], dtype=wide)
    own = p.query.dtype is torch.bfloat16 and fused_unavailable(p.query.device, torch.bfloat16) is None
    by_head = own and stop - begin >= BY_HEAD_FROM and not _paged(p) and not p.softcap
    for start, key, value in _pieces(p, samples, begin, stop, whole=by_head):  # (H, C, D), (H, C, Dv)
        dtype = key.dtype if by_head else wide
        # a number is added inside the product, where it is not rounded to 16 bits
        added = bias if slopes is None and not isinstance(bias, Tensor) and not p.softcap else 0.0
        logits = _product(query.to(dtype), key.to(dtype).mT, p.scale_value, added, by_head)  # (H, R, C)
        if p.softcap:
            logits = logits.div_(p.softcap).tanh_().mul_(p.softcap)
        if slopes is not None:
            distance = (position - torch.arange(start, start + key.shape[1], device=key.device)).abs()
            logits = logits.to(wide).add_(bias - slopes * distance)
        elif isinstance(bias, Tensor) or p.softcap:
            logits = logits.to(wide).add_(bias)
        total += _product(logits.sigmoid_().to(dtype), value.to(dtype), 1.0, 0.0, by_head)  # (H, R, Dv)
    out[samples] = total.view(out[samples].shape)


def _paged(p: KVCacheProblem) -> bool:
    return p.block_table is not None and p.block_table.shape[1] > 1


def _pieces(
    p: KVCacheProblem, samples: slice, begin: int, stop: int, *, whole: bool
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the first key of each piece, and its keys and values (H, C, ·); a single piece if ``whole``."""
    size = max(PIECE // max(p.key.shape[2] * p.key.shape[3] * (samples.stop - samples.start), 1), 64)
    paged = _paged(p)
    if whole:
        size = stop - begin
    if p.block_table is None and samples.stop - samples.start > 1:
        everything = [cache[samples, begin:stop].transpose(1, 2).flatten(0, 1) for cache in (p.key, p.value)]
    elif not paged:
        everything = [_keys(p, cache, samples.start, begin, stop).transpose(0, 1) for cache in (p.key, p.value)]
    for start in range(begin, stop, size):
        end = min(start + size, stop)
        if paged:
            key, value = (_keys(p, cache, samples.start, start, end).transpose(0, 1) for cache in (p.key, p.value))
        else:
            key, value = (t[:, start - begin : end - begin] for t in everything)
        yield start, key, value


def _product(a: Tensor, b: Tensor, alpha: float, bias: float, by_head: bool) -> Tensor:
    """Return ``alpha · a b + bias``: (H, R, ·) (H, ·, C) → (H, R, C)."""
    one = a.new_ones(1, 1, 1)
    if by_head:
        return torch.stack([torch.addmm(one[0], x, y, beta=bias, alpha=alpha) for x, y in zip(a, b, strict=True)])
    return torch.baddbmm(one, a, b, beta=bias, alpha=alpha)
