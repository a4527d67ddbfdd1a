"""``flash_attn_with_kvcache``: decoding with a key/value cache, as in flash-attn 2.8 (``sigattn.flash``)."""

from torch import Tensor

from sigattn.flash import validation as flash_validation
from sigattn.flash.rotary import rotate
from sigattn.ops import validation
from sigattn.ops.kvcache import KV_CACHE, append_to_cache, check_cache_bounds, lengths_of_samples
from sigattn.ops.problem import KVCacheProblem, make_problem

_NAME = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, sigmoid_bias: float | Tensor | None = None, sigmoid_precision: str | None = None,
    backend: str | None = None, attn_mask: Tensor | None = None, normalize: bool = False,
) -> Tensor:  # fmt: skip
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
            1, N or 1) with one for each query. Pass the bias of the training, such as -log of the training length.
            There is no default, because -log n would change from token to token as the cache grows.
        sigmoid_precision, backend, normalize: see ``sigattn.flash``.
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
    >>> options = {"cache_seqlens": torch.tensor([5, 100]), "causal": True, "sigmoid_bias": -6.9}
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options).shape
    torch.Size([2, 1, 4, 64])
    """
    if return_softmax_lse:
        raise ValueError(f"{_NAME}: return_softmax_lse=True is not supported: a sigmoid has no log-sum-exp")
    if sigmoid_bias is None:
        raise TypeError(
            f"{_NAME}: sigmoid_bias must be the number or tensor that the model was trained with (such as -log of its "
            "training length): -log of the current length would change as the cache grows"
        )
    table = flash_validation.cache(_NAME, q, k_cache, v_cache, k, v, cache_batch_idx, block_table)
    batch, n, heads, _ = q.shape
    options = flash_validation.options(
        _NAME, q, batch, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, sigmoid_bias,
        sigmoid_precision, backend, normalize, queries=n,
    )  # fmt: skip
    num_splits = validation.count(_NAME, "num_splits", num_splits)
    if attn_mask is not None:
        validation.mask(_NAME, attn_mask, q, (batch, heads, n, None), "(B, Hq, N, K)", query_name="q")
    validation.refuse_gradients(_NAME, q, k_cache, v_cache, k, v, sigmoid_bias, alibi_slopes, attn_mask)
    if cache_leftpad is not None:
        validation.integers(_NAME, "cache_leftpad", cache_leftpad, (batch,), "(B,)", q.device)
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    lengths = lengths_of_samples(_NAME, "cache_seqlens", cache_seqlens, q, capacity if k is None else None)
    stops = lengths
    if k is not None:
        check_cache_bounds(_NAME, lengths, None, None, k_cache.shape[0], capacity)
        stops = lengths + k.shape[1]
    check_cache_bounds(_NAME, stops, cache_leftpad, table, k_cache.shape[0], capacity, "cache_leftpad")
    if rotary_cos is not None or rotary_sin is not None:
        k, cos, sin = flash_validation.rotary(_NAME, rotary_cos, rotary_sin, q, k)
        has_positions = causal or options["window"] not in (None, (-1, -1))
        q = rotate(q, cos, sin, lengths, rotary_interleaved, same_position=not has_positions)
        k = rotate(k, cos, sin, lengths, rotary_interleaved)
    if k is not None and v is not None:
        append_to_cache(k_cache, v_cache, k, v, lengths, table)
    problem = make_problem(
        KVCacheProblem, q, k_cache, v_cache, attn_mask=attn_mask, seqlens=stops, left_padding=cache_leftpad,
        block_table=table, num_splits=num_splits, **options,
    )  # fmt: skip
    return KV_CACHE(problem, backend)
