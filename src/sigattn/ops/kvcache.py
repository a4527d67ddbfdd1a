"""Public operator ``sigmoid_kvcache_attention``: queries against a cache of keys and values, appended in place.

A cache consists of pages of keys; row b of ``block_table`` lists the pages of sample b. A contiguous cache has one page
for each sample.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from sigattn.ops import autograd, blocked, llvm, reference, triton, validation
from sigattn.ops.custom_ops import Backend, Operator, has_values, library, record
from sigattn.ops.problem import KVCacheProblem, as_index, cast_operands, make_problem
from sigattn.ops.settings import BACKENDS

_NAME = "sigmoid_kvcache_attention"
_SEQLENS = KVCacheProblem._fields.index("seqlens")
_BOUNDS = ("seqlens", "left_padding", "block_table", "query_ends")  # fields that bound the keys to read


def check_cache_bounds(
    caller: str, seqlens: Tensor, left_padding: Tensor | None, block_table: Tensor | None, pages: int, capacity: int,
    padding_name: str = "left_padding",
) -> None:  # fmt: skip
    """Raise ValueError unless all keys lie within the cache, if lengths can be read without synchronising."""
    if torch.compiler.is_compiling() or not has_values(seqlens) or not seqlens.numel():
        return
    stops = seqlens.tolist()
    if min(stops) < 0 or max(stops) > capacity:
        message = f"a cache of {capacity} keys for each sample cannot hold lengths (new keys included) of {stops}"
        raise ValueError(f"{caller}: {message}")
    starts = [0] * len(stops) if left_padding is None else left_padding.tolist()
    if any(not 0 <= start <= stop for start, stop in zip(starts, stops, strict=True)):
        raise ValueError(f"{caller}: {padding_name} must lie in 0 … length; got {starts} and lengths {stops}")
    if block_table is None:
        return
    page = capacity // max(block_table.shape[1], 1)
    for row, start, stop in zip(block_table, starts, stops, strict=True):
        used = row[start // page : -(-stop // page)].tolist() if stop > start else []
        if used and (min(used) < 0 or max(used) >= pages):
            raise ValueError(f"{caller}: the table names pages {used}, but the cache has pages 0 … {pages - 1}")


def _with_checked_bounds(p: KVCacheProblem) -> KVCacheProblem:
    """Return a problem with checked copies of the tensors that bound its keys, unless they are on an accelerator."""
    if p.seqlens.device.type != "cpu":
        return p
    # copies, because whoever shares the memory of the originals may change it before they are used
    copies: Any = {name: t.clone() for name in _BOUNDS if (t := getattr(p, name)) is not None}
    p = p._replace(**copies)
    check_cache_bounds(_NAME, p.seqlens, p.left_padding, p.block_table, p.key.shape[0], p.capacity)
    return p


KV_CACHE: Operator[KVCacheProblem] = Operator(
    "kvcache",
    _NAME,
    KVCacheProblem,
    {
        "triton": Backend(triton.kvcache_forward, unavailable=triton.unavailable, device_type="cuda", prepares=True),
        "llvm": Backend(llvm.kvcache_forward, unavailable=llvm.unavailable, can_be_default=llvm.kvcache_can_be_default),
        "blocked": Backend(blocked.kvcache_forward),
        "reference": Backend(reference.kvcache_attention),
    },
    None,
    _with_checked_bounds,
    lambda p: p.key[1] * (1 if p.block_table is None else p.block_table[1]),  # the capacity, an upper bound
)


# -- appending --------------------------------------------------------------------------------------------------------


def _append(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, starts: Tensor, table: Tensor | None
) -> None:
    """Write new keys and values (B, new, Hkv, ·) into a cache (P, page, Hkv, ·), from index ``starts[b]`` on.

    On a CPU it raises ValueError if they do not fit; the cache is then unchanged.
    """
    batch, new = key.shape[:2]
    page = key_cache.shape[1]
    capacity = page * (1 if table is None else table.shape[1])
    if starts.device.type == "cpu":
        check_cache_bounds(
            _NAME, starts + new, starts, table, len(key_cache), capacity, "the index of the first new key"
        )
    if table is None and starts.device.type == "cpu" and batch <= new:  # few copies, of many tokens each
        for b, start in enumerate(starts.tolist()):
            key_cache[b, start : start + new], value_cache[b, start : start + new] = key[b], value[b]
        return
    positions = starts.long()[:, None]  # (B, new)
    if new != 1:
        positions = positions + torch.arange(new, device=key.device)
    if table is None:
        pages = torch.arange(batch, device=key.device)[:, None].expand_as(positions)
    else:
        pages = table.long().gather(1, positions // page)
    slots = positions % page
    key_cache[pages, slots] = key
    value_cache[pages, slots] = value


library.define(
    "append_to_cache(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, Tensor starts, "
    "Tensor? table) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.impl("append_to_cache", _append, "CompositeExplicitAutograd")
torch.library.register_fake("sigattn::append_to_cache", lambda *_: None, lib=library)
append_to_cache = torch.ops.sigattn.append_to_cache.default
autograd.register_without(library, append_to_cache, "sigattn::append_to_cache")


# -- the operator -----------------------------------------------------------------------------------------------------


def sigmoid_kvcache_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    bias: float | Tensor,
    cache_seqlens: int | Tensor | None = None,
    left_padding: Tensor | None = None,
    block_table: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    normalize: bool = False,
    num_splits: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Append new keys and values to a cache, in place, and compute sigmoid attention of new queries against the cache.

    Sample b's new keys and values are written to the positions cache_seqlens[b], cache_seqlens[b] + 1, … of its cache,
    and the queries see them; the caller adds their number to ``cache_seqlens`` afterwards. A sample's last query is
    aligned with its last key. There is no gradient. Results repeat bitwise: the partial sums of GPU programs, which
    need no rescaling (Sect. 4), are added in a fixed order.

    Args:
        query: (B, N, Hq, D).
        key_cache: (B, M, Hkv, D); or pages of any size, (P, page_size, Hkv, D), with ``block_table``.
        value_cache: the same with Dv.
        key, value: (B, N_new, Hkv, D) and (B, N_new, Hkv, Dv), in the cache's dtype; or both None.
        bias: b, a number or a floating-point tensor broadcastable to (B, Hq, N, 1): that of the training, such as -log
            of the training length. (There is no default: -log of the current length would change as the cache grows.)
        cache_seqlens: number of keys of each sample in the cache, before the new ones: (B,) integers, or one number for
            all. None, without ``key``, for a full cache. (On an accelerator the values are not checked, because reading
            them would synchronise.)
        left_padding: (B,) integers, position of each sample's first key, if prompts are padded on the left; None for 0.
        block_table: (B, pages of each) integers, the pages of each sample in order; None for a contiguous cache.
        attn_mask: bool (True = attend) or floating point (added to the logits), (B or 1, Hq or 1, N or 1, K) or the
            last dimensions of that, for the last K keys of each sample, new keys included; earlier keys are not masked.
            The dimension K does not broadcast.
        is_causal: if True, a query attends to keys up to the one it is aligned with.
        window: (left, right): the query aligned with key p attends to keys p - left … p + right; -1 is unlimited.
        scale, enable_gqa, alibi_slopes, softcap, normalize: as in ``sigmoid_attention``.
        num_splits: number of parts of the keys, one for each GPU program; 0 lets the kernel choose.
        backend: as in ``sigmoid_attention``.

    Returns:
        (B, N, Hq, Dv), in the query's dtype. (Under autocast, query and cache are cast to autocast's dtype, which
        copies the cache, unless there are new keys, which are written as they are.)

    Raises:
        ValueError: shapes, devices or values that do not fit, or an unknown backend; the cache is unchanged.
        TypeError: an argument of the wrong type, or tensors of mixed or unsupported dtypes.
        RuntimeError: if a tensor requires a gradient.

    >>> key_cache, value_cache = torch.zeros(2, 2, 128, 4, 64).unbind()
    >>> query, key, value = torch.randn(3, 2, 1, 4, 64).unbind()
    >>> options = {"bias": -6.9, "cache_seqlens": torch.tensor([5, 100])}
    >>> sigmoid_kvcache_attention(query, key_cache, value_cache, key, value, **options).shape
    torch.Size([2, 1, 4, 64])
    """
    if not isinstance(query, Tensor) and has_torch_function((query, key_cache, value_cache)):  # type: ignore[unreachable]
        return record(sigmoid_kvcache_attention, locals())  # type: ignore[unreachable]
    arguments = (
        query, key_cache, value_cache, cache_seqlens, bias, attn_mask, alibi_slopes, left_padding, block_table, None,
        is_causal, scale, enable_gqa, window, softcap, normalize, num_splits, backend, *_described(query, key),
        *_described(query, value),
    )  # fmt: skip
    if (known := KV_CACHE.recall(arguments)) is not None:
        call, tensors = known
        if key is not None and value is not None:
            given = (tensors[_SEQLENS], left_padding, block_table)
            tensors[_SEQLENS] = _append_checked(key_cache, value_cache, key, value, *given)
        return KV_CACHE.run(call, tensors)
    if key is None:
        query, key_cache, value_cache = cast_operands(query, key_cache, value_cache)
    validation.cache(
        _NAME, query=query, key_cache=key_cache, value_cache=value_cache, key=key, value=value, block_table=block_table,
        enable_gqa=enable_gqa,
    )  # fmt: skip
    batch, n, heads, _ = query.shape
    if bias is None:
        raise TypeError(f"{_NAME}: bias must be the number or tensor that the model was trained with, got None")
    options = validation.options(
        _NAME, query, (batch, heads, n, 1), (batch, heads, n, None), "(B, Hq, N, K)", attn_mask=attn_mask,
        is_causal=is_causal, scale=scale, bias=bias, window=window, alibi_slopes=alibi_slopes, softcap=softcap,
        normalize=normalize,
    )  # fmt: skip
    if left_padding is not None:
        validation.integers(_NAME, "left_padding", left_padding, (batch,), "(B,)", query.device)
    num_splits = validation.count(_NAME, "num_splits", num_splits)
    validation.choice(_NAME, "backend", backend, BACKENDS)
    validation.refuse_gradients(_NAME, query, key_cache, value_cache, key, value, bias, alibi_slopes, attn_mask)
    block_table = None if block_table is None else as_index(block_table)
    capacity = key_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    seqlens = lengths_of_samples(_NAME, "cache_seqlens", cache_seqlens, query, None if key is not None else capacity)
    if key is not None and value is not None:  # checked before the cache is changed
        seqlens = _append_checked(key_cache, value_cache, key, value, seqlens, left_padding, block_table)
        arguments = (*arguments[:_SEQLENS], seqlens, *arguments[_SEQLENS + 1 :])  # a repeated call appends as well
    problem = make_problem(
        KVCacheProblem, query, key_cache, value_cache, seqlens=seqlens, left_padding=left_padding,
        block_table=block_table, num_splits=num_splits, **options,
    )  # fmt: skip
    return KV_CACHE(problem, backend, arguments)


def _described(query: Any, new: Any) -> tuple[Any, ...]:
    """Return what the validity of new keys or values depends on, as ``Operator.recall`` takes it."""
    if new is None:
        return (None,)
    if type(new) is not Tensor or type(query) is not Tensor:
        return (...,)  # no call is known with it
    fits = new.dtype is query.dtype and new.device == query.device and new.layout is torch.strided
    return tuple(new.shape), fits, new.requires_grad


def _append_checked(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, seqlens: Tensor, left_padding: Tensor | None,
    table: Tensor | None,
) -> Tensor:  # fmt: skip
    """Append new keys and values, and return the lengths with them; raise ValueError, before, if they do not fit."""
    stops, capacity = seqlens + key.shape[1], key_cache.shape[1] * (1 if table is None else table.shape[1])
    check_cache_bounds(_NAME, stops, left_padding, table, key_cache.shape[0], capacity)
    append_to_cache(key_cache, value_cache, key, value, seqlens, table)
    return stops


def lengths_of_samples(caller: str, name: str, lengths: Any, query: Tensor, default: int | None) -> Tensor:  # (B,)
    """Return a number, or a tensor () or (B,), as a tensor (B,); ``default`` for None, which is invalid if that is."""
    if lengths is None and default is None:
        raise ValueError(f"{caller}: new keys and values need {name}, the number of keys that the cache holds already")
    if not isinstance(lengths, Tensor):
        length = default if lengths is None else validation.position(caller, f"{name}, if not a tensor,", lengths)
        return torch.full((query.shape[0],), length, dtype=torch.int32, device=query.device)  # type: ignore[arg-type]
    if lengths.dim() == 0:
        lengths = lengths.expand(query.shape[0])
    validation.integers(caller, name, lengths, (query.shape[0],), "(B,)", query.device)
    return as_index(lengths)
