"""Attention with a cache of keys and values: the registered ops, and their implementation on a CPU.

A cache consists of pages of keys; row b of ``table`` lists the pages of sample b. A contiguous cache has one page for
each sample. Partial results over disjoint keys add, so that a long cache can be processed in parts without rescaling
(Sect. 4). None of these ops has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sigattn.ops import autograd, custom_ops, triton
from sigattn.ops.cpu import blocked
from sigattn.ops.cpu.matmul import fused_unavailable
from sigattn.ops.problem import UNLIMITED, KVCacheProblem, Problem

# measured on a CPU (docs/log.md)
TOGETHER = 1 << 20  # elements of K up to which samples are batched; more would exceed the processor's cache
PIECE = 1 << 19  # elements of K processed at a time, so that converted keys are still in the processor's cache
BY_HEAD_FROM = 2048  # number of keys from which bfloat16 products are computed without conversion, one head at a time


# -- the implementation in PyTorch, for a CPU and for devices without a kernel -----------------------------------------


def blocked_forward(problem: KVCacheProblem) -> Tensor:  # (B, N, Hq, Dv)
    """Return the output of sigmoid attention."""
    p = problem
    (batch, n, heads, _), dv = p.query.shape, p.value.shape[3]
    out = p.query.new_empty(batch, n, heads, dv)
    if not out.numel():
        return out
    lengths = p.seqlens.tolist()
    firsts = [0] * batch if p.left_padding is None else p.left_padding.tolist()
    ends = lengths if p.query_ends is None else p.query_ends.tolist()
    together = (
        n == 1
        and p.attn_mask is None
        and len(set(lengths)) == len(set(ends)) == 1
        and not any(firsts)
        and batch > 1
        and _is_folded(p)
    )
    if together and batch * lengths[0] * p.key.shape[2] * p.key.shape[3] <= TOGETHER:
        _one_query(p, slice(0, batch), firsts[0], lengths[0], ends[0] - 1, out)
        return out
    for b, (first, length, end) in enumerate(zip(firsts, lengths, ends, strict=True)):
        if n == 1 and p.attn_mask is None:
            _one_query(p, slice(b, b + 1), first, length, end - 1, out)
        else:
            out[b] = blocked.forward(_dense(p, b, first, length, end))[0].transpose(0, 1)
    return out


def _is_folded(p: KVCacheProblem) -> bool:
    """Return True if samples and key heads can be viewed as one dimension (memory order (B, H, M, D), as in layers)."""
    _, _, key_heads, _ = p.key.shape
    apart = all(t.stride(0) == key_heads * t.stride(2) for t in (p.key, p.value))
    return p.block_table is None and apart and len(p.key) == len(p.query)


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
    bias = p.bias if p.bias.dim() == 0 else _of(p.bias, slice(b, b + 1)).unsqueeze(-1)
    return Problem(
        p.query[b : b + 1].transpose(1, 2),
        key,
        value,
        bias,
        _mask_of(p, b, length - first),
        alibi_slopes=None if p.alibi_slopes is None else _of(p.alibi_slopes, slice(b, b + 1)),
        scale=p.scale,
        left=p.left,
        right=p.right,
        query_offset=end - p.query.shape[1] - first,
        softcap=p.softcap,
    )


def _mask_of(p: KVCacheProblem, b: int, keys: int) -> Tensor | None:  # (1, Hq or 1, N or 1, keys)
    """Return the mask of all keys of a sample, given that of its last keys."""
    if p.attn_mask is None:
        return None
    mask = _of(p.attn_mask, slice(b, b + 1))[..., max(p.attn_mask.shape[3] - max(keys, 0), 0) :]
    visible = 1.0 if mask.dtype is torch.bool else 0.0
    return torch.nn.functional.pad(mask, (max(keys, 0) - mask.shape[3], 0), value=visible)


def _one_query(p: KVCacheProblem, samples: slice, first: int, length: int, position: int, out: Tensor) -> None:
    """Compute the outputs of samples of one length with a single query each, the case of decoding, into ``out``."""
    begin = first if p.left == UNLIMITED else max(first, position - p.left)
    stop = length if p.right == UNLIMITED else min(length, position + p.right + 1)
    begin = min(begin, max(stop, first))
    batch, group = samples.stop - samples.start, p.query.shape[2] // p.key.shape[2]

    def by_key_head(t: Tensor) -> Tensor:  # (B or 1, Hq or 1) → (H, R, 1): H key heads, R query heads of each
        return t.expand(batch, p.query.shape[2]).reshape(-1, group, 1).to(wide)

    wide = torch.promote_types(p.query.dtype, torch.float32)
    bias = p.bias.item() if p.bias.dim() == 0 else by_key_head(_of(p.bias, samples)[..., 0])
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


# -- the ops ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CachedKernels:
    """Implementation of cached attention by a backend; attributes as in ``library.Kernels``."""

    forward: Callable[[KVCacheProblem], Tensor]
    unavailable: Callable[[Any], str | None]
    device_types: tuple[str, ...] | None = None


KERNELS = {
    "triton": CachedKernels(triton.kvcache_forward, triton.unavailable, device_types=("cuda",)),
    "blocked": CachedKernels(blocked_forward, lambda _: None),
}

_library = torch.library.Library("sigattn", "FRAGMENT")
_library.define(
    "kvcache_forward(Tensor query, Tensor key, Tensor value, Tensor seqlens, Tensor bias, Tensor? attn_mask, "
    "Tensor? alibi_slopes, Tensor? left_padding, Tensor? block_table, Tensor? query_ends, float? scale, int left, "
    "int right, bool fast, float softcap, SymInt num_splits, str backend) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "append_to_cache(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, Tensor starts, "
    "Tensor? table) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def check_cache_bounds(lengths: Tensor, first: Tensor | None, table: Tensor | None, pages: int, capacity: int) -> None:
    """Raise unless all keys lie within the cache. Tensors on an accelerator are not checked, to avoid synchronising.

    Raises:
        ValueError: naming the values that do not fit.
    """
    if lengths.device.type != "cpu" or not lengths.numel():
        return
    stops = lengths.tolist()
    if min(stops) < 0 or max(stops) > capacity:
        raise ValueError(
            f"a cache of {capacity} keys for each sample cannot hold lengths (new keys included) of {stops}"
        )
    starts = [0] * len(stops) if first is None else first.tolist()
    if first is not None and any(not 0 <= start <= stop for start, stop in zip(starts, stops, strict=True)):
        raise ValueError(f"cache_leftpad must lie in 0 … length; got {starts} and lengths {stops}")
    if table is None:
        return
    page = capacity // max(table.shape[1], 1)
    for row, start, stop in zip(table, starts, stops, strict=True):
        used = row[start // page : -(-stop // page)].tolist() if stop > start else []
        if used and (min(used) < 0 or max(used) >= pages):
            raise ValueError(f"the table names pages {used}, but the cache has pages 0 … {pages - 1}")


def _forward(*args: Any) -> Tensor:
    problem, kernels = KVCacheProblem(*args[:-1]), KERNELS[args[-1]]
    p = problem
    check_cache_bounds(p.seqlens, p.left_padding, p.block_table, len(p.key), p.capacity)
    return kernels.forward(problem)


def _append(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, starts: Tensor, table: Tensor | None
) -> None:
    batch, new = key.shape[:2]
    page = key_cache.shape[1]
    capacity = page * (1 if table is None else table.shape[1])
    check_cache_bounds(starts + new, starts if len(starts) else None, table, len(key_cache), capacity)
    if table is None and starts.device.type == "cpu" and batch * new:
        for b, start in enumerate(starts.tolist()):
            key_cache[b, start : start + new] = key[b]
            value_cache[b, start : start + new] = value[b]
        return
    positions = starts.long()[:, None] + torch.arange(new, device=key.device)  # (B, new)
    pages = torch.arange(batch, device=key.device)[:, None].expand_as(positions)
    if table is not None:
        pages = table.long().gather(1, positions // page)
    key_cache[pages, positions % page] = key
    value_cache[pages, positions % page] = value


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


def _fake_append(*_: Any) -> None:
    return None


_library.impl("kvcache_forward", _forward, "CompositeExplicitAutograd")
_library.impl("append_to_cache", _append, "CompositeExplicitAutograd")
torch.library.register_fake("sigattn::kvcache_forward", _fake_forward, lib=_library)
torch.library.register_fake("sigattn::append_to_cache", _fake_append, lib=_library)
for _op in (torch.ops.sigattn.kvcache_forward.default, torch.ops.sigattn.append_to_cache.default):
    autograd.register_without(
        _library,
        _op,
        "sigmoid attention of a key/value cache has no gradient: call it under torch.no_grad() or inference_mode()",
    )


def append(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, starts: Tensor, table: Tensor | None = None
) -> None:
    """Write new keys and values (B, new, Hkv, ·) into a cache (P, page, Hkv, ·), from index ``starts[b]`` on.

    Raises:
        ValueError: on a CPU, if they do not fit; the cache is then unchanged.
    """
    torch.ops.sigattn.append_to_cache.default(key_cache, value_cache, key, value, starts, table)


def choose(problem: KVCacheProblem, backend: str | None) -> str:
    """Return ``backend``, or if it is None the fastest backend that supports the problem.

    Raises:
        ValueError: if ``backend`` does not support the problem.
    """
    device = problem.query.device.type
    if backend is None:
        candidates = (n for n, k in KERNELS.items() if k.device_types is None or device in k.device_types)
        return next(n for n in candidates if KERNELS[n].unavailable(problem) is None)
    reason = KERNELS[backend].unavailable(problem)
    if reason is not None:
        raise ValueError(f"sigmoid_attention: backend {backend!r} does not support this call: {reason}")
    return backend


def call(problem: KVCacheProblem, backend: str) -> Tensor:
    """Run a problem on a backend."""
    if custom_ops.can_bypass_dispatcher([t for t in problem if isinstance(t, Tensor)]):
        return _forward(*problem, backend)  # saves the 20 µs of the op
    out: Tensor = torch.ops.sigattn.kvcache_forward.default(*problem, backend)
    return out
