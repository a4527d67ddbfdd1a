"""``flash_attn_with_kvcache``: decoding with a key/value cache, as in flash-attn 2.8 (``sigattn.flash``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sigattn.flash import chunks, options, packing
from sigattn.flash import validation as flash_validation
from sigattn.ops import validation
from sigattn.ops.kvcache import (
    KV_CACHE,
    append_to_cache,
    check_cache_bounds,
    checked_kvcache_attention,
    fast_path,
    lengths_of_samples,
)

_NAME = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    sigmoid_bias: float | str | Tensor | None = None,
    sigmoid_precision: str | None = None,
    backend: str | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Append new keys and values to a cache, in place, and compute sigmoid attention of new queries against the cache.

    Sample b's new keys and values are written to the positions cache_seqlens[b], cache_seqlens[b] + 1, … of its cache,
    and the queries see them; the caller adds their number to ``cache_seqlens`` afterwards. There is no gradient.
    Results repeat bitwise: the partial sums of GPU programs are added in a fixed order.

    Args:
        q: (B, N, Hq, D).
        k_cache: (B_cache, M, Hkv, D); or (pages, page_size, Hkv, D), pages of any size, with ``block_table``.
        v_cache: the same with Dv.
        k, v: (B, N_new, Hkv, D) and (B, N_new, Hkv, Dv), or both None.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): rotate the first rotary_dim features of k by the angles of
            their positions, and those of q by the angles of theirs: cache_seqlens + i with causal or a window, else
            cache_seqlens for all. The tables must contain all positions that are used.
        cache_seqlens: number of keys of each sample in the cache: (B,) integers, or one number for all. None, without
            ``k``, for a full cache. (On an accelerator the values are not checked: reading them would synchronise.)
        cache_batch_idx: (B,) integers, index of each sample's cache; None for b. Not with block_table.
        cache_leftpad: (B,) integers, position of each sample's first key; None for 0.
        block_table: (B, pages of each) integers, the pages of each sample in order.
        softmax_scale: factor of Q Kᵀ; None for D^-1/2.
        causal: query i sees keys up to the one aligned with it; the last query is aligned with the last key.
        window_size: (left, right) of the key aligned with a query; -1 is unlimited.
        softcap: c > 0 caps the scaled product, as in ``flash_attn_func``; 0 for no cap.
        rotary_interleaved: True if features 2i and 2i + 1 are a pair; False for features i and i + rotary_dim / 2.
        alibi_slopes: (Hq,) or (B, Hq): slope · distance is subtracted from the logits.
        num_splits: number of parts of the keys, one for each GPU program; 0 lets the kernel choose.
        return_softmax_lse: must be False.
        sigmoid_bias: b, required: a number, or a floating-point tensor: 0-d, (B,), (B or 1, Hq or 1), or (B or 1, Hq or
            1, N or 1) with one for each query. Pass the bias of the training, such as -log of the training length. The
            rule "-log n" is not supported, because it would change from token to token as the cache grows.
        sigmoid_precision, backend: see ``sigattn.flash``.
        attn_mask: bool (True = attend) or floating point (added to the logits), (B or 1, Hq or 1, N or 1, K) or the
            last dimensions of that. It applies to the last K keys of each sample, new keys included; the keys before
            them are not masked. With K = N_new it masks only the new keys, as a tree of draft tokens needs; with K =
            the sample's length, all of them. The dimension K does not broadcast. It combines with causal and
            window_size.

    Returns:
        Attention output, (B, N, Hq, Dv), in q's dtype.

    Raises:
        ValueError: shapes, devices or values that do not fit, or an argument that is not supported; the cache is
            unchanged.
        TypeError: an argument of the wrong type, tensors of mixed or unsupported dtypes, or no sigmoid_bias.
        RuntimeError: if a tensor requires a gradient.

    >>> k_cache, v_cache = torch.zeros(2, 2, 128, 4, 64).unbind()
    >>> q, k, v = torch.randn(3, 2, 1, 4, 64).unbind()
    >>> lengths = torch.tensor([5, 100])
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, sigmoid_bias=-6.9).shape
    torch.Size([2, 1, 4, 64])
    """
    special = (rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table, alibi_slopes, sigmoid_precision)
    plain = window_size == (-1, -1) and not (softcap or num_splits or return_softmax_lse or backend)
    plain = plain and attn_mask is None
    if plain and all(x is None for x in special):
        out = fast_path(q, k_cache, v_cache, k, v, cache_seqlens, softmax_scale, sigmoid_bias)
        if out is not None:
            return out
    return attend(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse,
        sigmoid_bias, sigmoid_precision, backend, attn_mask,
    )  # fmt: skip


def attend(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    cache_seqlens: Any,
    cache_batch_idx: Any,
    cache_leftpad: Any,
    block_table: Any,
    softmax_scale: Any,
    causal: bool,
    window_size: Any,
    softcap: Any,
    rotary_interleaved: bool,
    alibi_slopes: Any,
    num_splits: Any,
    return_softmax_lse: bool,
    sigmoid_bias: Any,
    sigmoid_precision: str | None,
    backend: str | None,
    attn_mask: Any = None,
    *,
    cu_seqlens_q: Any = None,
    max_seqlen_q: Any = None,
    cu_seqlens_k_new: Any = None,
    rotary_seqlens: Any = None,
    attention_chunk: int = 0,
) -> Tensor:
    """Return the attention of new queries against a cache, for the functions of several versions of flash-attn.

    Args:
        cu_seqlens_q, max_seqlen_q: (B + 1,) integers and the longest length: q is then packed, (total_q, Hq, D).
        cu_seqlens_k_new: (B + 1,) integers: k and v are then packed, (total_new, Hkv, ·).
        rotary_seqlens: (B,), rotary position of each sample's first new query and key; None for cache_seqlens.
        attention_chunk: c > 0: a query sees only keys of its own chunk of c, by a mask of B · N · capacity entries
            unless N is 1.
        The rest is as in ``flash_attn_with_kvcache``.
    """
    _refuse(return_softmax_lse)
    softcap = validation.softcap(_NAME, softcap)
    query_tokens = new_tokens = None
    if cu_seqlens_q is not None:
        query_tokens = packing.tokens(_NAME, "q", q, "cu_seqlens_q", cu_seqlens_q)
        q = query_tokens.padded(q, _longest(max_seqlen_q, query_tokens))
    if cu_seqlens_k_new is not None:
        flash_validation.new_keys(_NAME, q, k_cache, v_cache, k, v)
        new_tokens = packing.tokens(_NAME, "k", k, "cu_seqlens_k_new", cu_seqlens_k_new, whole=True)
        k, v = k.unsqueeze(1), v.unsqueeze(1)  # (total_new, 1, Hkv, ·)
    batched = (k, v) if new_tokens is None else (None, None)
    flash_validation.cache(_NAME, q, k_cache, v_cache, batched[0], batched[1], cache_batch_idx, block_table)
    batch, n, heads, _ = q.shape
    validation.choice(_NAME, "backend", backend, tuple(KV_CACHE.backends))
    _, softmax_scale, window = options.numbers(_NAME, 0.0, softmax_scale, window_size)
    _check_bias(sigmoid_bias, q)
    if alibi_slopes is not None:
        validation.slopes(_NAME, alibi_slopes, q, batch, heads, two_sided=False)
    num_splits = validation.count(_NAME, "num_splits", num_splits)
    if attention_chunk and attn_mask is not None:
        raise ValueError(f"{_NAME}: attention_chunk with attn_mask is not supported: combine both into attn_mask")
    if attn_mask is not None:
        validation.mask(_NAME, attn_mask, q, (batch, heads, n, None), "(B, Hq, N, K)")
    validation.refuse_gradients(_NAME, q, k_cache, v_cache, k, v, sigmoid_bias, alibi_slopes, attn_mask)
    table = block_table if cache_batch_idx is None else cache_batch_idx.unsqueeze(1)
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    lengths = lengths_of_samples(_NAME, "cache_seqlens", cache_seqlens, q, capacity if k is None else None)
    for argument, t in (("cache_leftpad", cache_leftpad), ("rotary_seqlens", rotary_seqlens)):
        if t is not None:
            validation.integers(_NAME, argument, t, (batch,), "(B,)", q.device)
    for tokens in (query_tokens, new_tokens):
        if tokens is not None and len(tokens.counts) != batch:
            raise ValueError(
                f"{_NAME}: cu_seqlens_q and cu_seqlens_k_new must have as many sequences as there are samples ({batch})"
            )
    new = new_tokens.counts if new_tokens is not None else 0 if k is None else k.shape[1]
    check_cache_bounds(_NAME, lengths, None, None, len(k_cache), capacity)
    check_cache_bounds(_NAME, lengths + new, cache_leftpad, table, len(k_cache), capacity, "cache_leftpad")
    if rotary_cos is not None or rotary_sin is not None:
        flash_validation.rotary(_NAME, rotary_cos, rotary_sin, q, k)
        same = not causal and window in (None, (-1, -1)) and not attention_chunk
        starts = lengths if rotary_seqlens is None else rotary_seqlens
        query_positions = _positions(starts, n, query_tokens, same=same)
        key_positions = _positions(starts, k.shape[1], new_tokens, packed=True)
        _check_rotary_positions(rotary_cos, query_positions, key_positions)
        q = _rotated(q, query_positions, rotary_cos, rotary_sin, rotary_interleaved)
        k = _rotated(k, key_positions, rotary_cos, rotary_sin, rotary_interleaved)
    if k is not None:
        _append(k_cache, v_cache, k, v, lengths, table, new_tokens)
    lengths = lengths if k is None else lengths + new
    ends = None if query_tokens is None else lengths - query_tokens.counts + n
    if attention_chunk and n == 1:  # the keys before the chunk need not be read
        cache_leftpad = chunks.start(lengths, cache_leftpad, attention_chunk)
    elif attention_chunk:
        last = lengths if ends is None else ends
        attn_mask = chunks.cached(lengths, cache_leftpad, last, n, capacity, attention_chunk)
    out = checked_kvcache_attention(
        q,
        k_cache,
        v_cache,
        lengths,
        bias=options.operator_bias(sigmoid_bias),
        left_padding=cache_leftpad,
        block_table=table,
        query_ends=ends,
        attn_mask=attn_mask,
        is_causal=causal,
        scale=softmax_scale,
        window=window,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        num_splits=num_splits,
        backend=backend,
        precision=sigmoid_precision,
    )
    return out if query_tokens is None else query_tokens.packed(out)


def _append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    table: Tensor | None,
    tokens: packing.Tokens | None,
) -> None:
    """Append k and v to the cache; packed tokens (total, 1, Hkv, ·) are written as samples of one token each."""
    if tokens is not None:
        table = tokens.sample[:, None] if table is None else table[tokens.sample]
        lengths = lengths.long()[tokens.sample] + tokens.offset
    append_to_cache(k_cache, v_cache, k, v, lengths, table)


def _longest(max_seqlen_q: Any, query_tokens: packing.Tokens) -> int:
    if max_seqlen_q is None:
        raise ValueError(f"{_NAME}: cu_seqlens_q needs max_seqlen_q, the length of the longest sequence")
    longest = validation.count(_NAME, "max_seqlen_q", max_seqlen_q)
    counts = query_tokens.counts
    if counts.device.type == "cpu" and not torch.compiler.is_compiling() and len(counts) and counts.max() > longest:
        raise ValueError(f"{_NAME}: max_seqlen_q is {longest}, but cu_seqlens_q has a sequence of {int(counts.max())}")
    return longest


def _check_rotary_positions(cos: Tensor, *positions: Tensor) -> None:
    if cos.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for p in positions:
        if p.numel() and (int(p.min()) < 0 or int(p.max()) >= len(cos)):
            raise ValueError(
                f"{_NAME}: rotary_cos does not contain the positions {int(p.min())} … {int(p.max())}; "
                f"got {validation.describe(rotary_cos=cos)}"
            )


def _refuse(return_softmax_lse: bool) -> None:
    if return_softmax_lse:
        raise ValueError(f"{_NAME}: return_softmax_lse=True is not supported: a sigmoid has no log-sum-exp")


def _check_bias(bias: Any, q: Tensor) -> None:
    if bias is None or isinstance(bias, str):
        raise TypeError(
            f"{_NAME}: sigmoid_bias must be the number or tensor that the model was trained with (such as -log of its "
            f"training length); got {bias!r}. -log of the current length would change as the cache grows"
        )
    batch, n, heads, _ = q.shape
    if isinstance(bias, Tensor) and bias.dim() == 3:
        flash_validation.bias(_NAME, bias[..., 0], q, batch)
        if bias.shape[2] not in (1, n):
            raise ValueError(
                f"{_NAME}: a sigmoid_bias of three dimensions must be (B or 1, Hq or 1, N or 1) = ({batch} or 1, "
                f"{heads} or 1, {n} or 1); got {validation.describe(sigmoid_bias=bias)}"
            )
        return
    flash_validation.bias(_NAME, bias, q, batch)


def _positions(
    starts: Tensor, count: int, tokens: packing.Tokens | None, *, same: bool = False, packed: bool = False
) -> Tensor:  # (B, count), or (total, 1) if packed
    """Return the positions of new queries or keys: consecutive ones, or the first one for all if ``same``."""
    if packed and tokens is not None:
        return (starts.long()[tokens.sample] + tokens.offset)[:, None]
    steps = torch.arange(count, device=starts.device)
    if same:
        steps = torch.zeros_like(steps)
    if tokens is None:
        return starts.long()[:, None] + steps
    return starts.long()[:, None] + torch.minimum(steps, tokens.counts[:, None] - 1).clamp(min=0)


def _rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x (B, N, H, D) with its first features rotated in pairs by the angles of positions (B, N)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t[positions].unsqueeze(2).to(wide) for t in (cos, sin))  # (B, N, 1, rotary_dim / 2)
    rotary_dim = 2 * cos.shape[-1]
    head, rest = x[..., :rotary_dim].to(wide), x[..., rotary_dim:]
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((rotated.to(x.dtype), rest), -1)
