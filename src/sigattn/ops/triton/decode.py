"""Decoding kernel: few queries against a long cache of keys and values, contiguous or in pages.

The queries of all heads that share a key head are the rows of one tile, so that a key is read once for all of them. The
keys of a sample are split over programs, whose partial outputs are added in a fixed order.
"""

import triton
import triton.language as tl

from sigattn.ops.triton import rows, scores, tile
from sigattn.ops.triton.activation import LN2, LOG2E
from sigattn.ops.triton.args import Sizes

_UNSPECIALIZED = ["bias_b", "bias_h", "bias_n", "table_b", "n", "pages", "page_size", "table_width", "left", "right"]


@triton.jit(do_not_specialize=[*_UNSPECIALIZED, "splits"])
def decode_kernel(
    query, key, value, out, row_sums, query_strides, key_strides, value_strides, out_strides, out_split,
    seqlens, query_ends, left_padding, block_table, table_b,
    bias, bias_b, bias_h, bias_n, mask, mask_keys, alibi,
    n, kv_heads, pages, page_size, table_width, left, right, splits, scales, OPT: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows, (query, head of the group), against one part of the keys; args.py describes the arguments.

    Strides of key and value are those of (page or sample, head, slot, feature). query_ends: position after the last
    query, if that is not the last key's. mask: of the last mask_keys keys. row_sums: (parts, B, N, Hq, 2).
    """
    BLOCK_M: tl.constexpr = OPT.BLOCK_M
    BLOCK_N: tl.constexpr = OPT.BLOCK_N
    q_strides = tile.aligned(query_strides, OPT)
    k_strides = tile.aligned(key_strides, OPT)
    v_strides = tile.aligned(value_strides, OPT)
    row_tiles = tl.cdiv(n * OPT.GROUP, BLOCK_M)
    program, split = tl.program_id(0), tl.program_id(1)
    start_m = program % row_tiles * BLOCK_M
    b, h_kv = (program // row_tiles // kv_heads).to(tl.int64), program // row_tiles % kv_heads
    offs_m = start_m + tl.arange(0, BLOCK_M)
    row_exists = offs_m < n * OPT.GROUP
    i = offs_m // OPT.GROUP  # query
    h = h_kv * OPT.GROUP + offs_m % OPT.GROUP

    length = tl.minimum(tl.load(seqlens + b).to(tl.int32), table_width * page_size)
    begin = 0
    if left_padding is not None:
        begin = tl.maximum(tl.load(left_padding + b).to(tl.int32), 0)
    end = length
    if query_ends is not None:
        end = tl.load(query_ends + b).to(tl.int32)
    start, stop = begin, length
    if OPT.HAS_LEFT:
        start = tl.maximum(begin, end - n + start_m // OPT.GROUP - left)
    if OPT.HAS_RIGHT:
        last = tl.minimum((start_m + BLOCK_M - 1) // OPT.GROUP, n - 1)
        stop = tl.minimum(length, end - n + last + right + 1)
    start = start // BLOCK_N * BLOCK_N
    keys_per_split = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), BLOCK_N), splits) * BLOCK_N
    start += split * keys_per_split
    stop = tl.minimum(stop, start + keys_per_split)

    i64, h64 = i.to(tl.int64), h.to(tl.int64)
    offs_d, offs_dv = tl.arange(0, tile.tile_width(OPT.D))[None, :], tl.arange(0, tile.tile_width(OPT.DV))[None, :]
    # a cache with features first has strides along them that times D exceed 32 bits
    d64, dv64 = offs_d.to(tl.int64), offs_dv.to(tl.int64)
    pointers = query + b * q_strides.b + i64[:, None] * q_strides.n + h64[:, None] * q_strides.h + offs_d * q_strides.d
    q = tl.load(pointers, mask=row_exists[:, None] & (offs_d < OPT.D), other=0.0)  # [BLOCK_M, D]
    slopes = (0.0, 0.0)
    if OPT.SLOPES:
        pointers = alibi.pointer + b * alibi.b + h * alibi.h
        before = tl.load(pointers, mask=row_exists, other=0.0).to(tl.float32)[:, None]
        slopes = (before, tl.load(pointers + alibi.s, mask=row_exists, other=0.0).to(tl.float32)[:, None])
    sizes = Sizes(n, length, kv_heads, end - n, left, right)
    if OPT.BIAS == "tensor":
        pointers = bias.pointer + b * bias_b + h64 * bias_h + i64 * bias_n
        z_bias = tl.load(pointers, mask=row_exists, other=0.0).to(tl.float32)[:, None] * -LOG2E
    else:
        z_bias = scores.load_bias(bias, 0, offs_m, sizes, OPT)
    shift, unit = scores.load_shift(bias, 1, OPT)

    acc = tile.zero_accumulator(BLOCK_M, tile.tile_width(OPT.DV), OPT.WGMMA)  # [BLOCK_M, DV]
    if OPT.NORMALIZE:  # the exponent follows the least z of each row, as the maximum of a softmax
        row_shift = tl.full((BLOCK_M,), rows.LARGEST_Z, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
    for start_n in tl.range(start, stop, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        valid = (offs_n >= begin) & (offs_n < stop)
        page, slot = b + tl.zeros_like(offs_n), offs_n
        if block_table is not None:
            page = tl.load(block_table + b * table_b + offs_n // page_size, mask=valid, other=0).to(tl.int64)
            slot = offs_n % page_size
            valid &= (page >= 0) & (page < pages)  # entries that name no page are not read
        k_rows = key + page * k_strides.b + slot.to(tl.int64) * k_strides.n + h_kv.to(tl.int64) * k_strides.h
        v_rows = value + page * v_strides.b + slot.to(tl.int64) * v_strides.n + h_kv.to(tl.int64) * v_strides.h
        # [BLOCK_N, D] and [BLOCK_N, DV]
        k = tl.load(k_rows[:, None] + d64 * k_strides.d, mask=valid[:, None] & (offs_d < OPT.D), other=0.0)
        v = tl.load(v_rows[:, None] + dv64 * v_strides.d, mask=valid[:, None] & (offs_dv < OPT.DV), other=0.0)
        # [BLOCK_M, D] @ [D, BLOCK_N] -> [BLOCK_M, BLOCK_N]
        logits = scores.apply_softcap(tile.dot(q, tl.trans(k), None, OPT), scales, OPT)
        z_term = z_bias
        if mask is not None:
            offs_mask = offs_n - (length - mask_keys)
            masked = row_exists[:, None] & (offs_mask >= 0)[None, :] & (offs_n < length)[None, :]
            m_rows = mask.pointer + b * mask.b + h64[:, None] * mask.h + i64[:, None] * mask.q
            other: tl.constexpr = 1 if OPT.MASK == "bool" else 0
            entries = tl.load(m_rows + offs_mask.to(tl.int64)[None, :] * mask.k, mask=masked, other=other)
            if OPT.MASK == "added":
                entries = entries.to(tl.float32)
                z_term = z_bias - scores.at_least_lowest(entries) * LOG2E
        p = scores.weights(
            logits, scales.z, z_term, slopes, shift, unit, i[:, None], offs_n[None, :], sizes, None, None, None, True,
            OPT, OPT.NORMALIZE,
        )  # fmt: skip
        none: tl.constexpr = float("inf") if OPT.NORMALIZE else 0.0
        if mask is not None:
            p = tl.where(entries != 0 if OPT.MASK == "bool" else entries != float("-inf"), p, none)
        if OPT.NORMALIZE:
            z = tl.where(valid[None, :], p, none)
            p, row_shift, rescale = rows.lifted_weights(z, row_shift, shift, OPT)
            acc *= rescale[:, None]
            total = total * rescale + tl.sum(p, 1)
        # [BLOCK_M, BLOCK_N] @ [BLOCK_N, DV]; where not valid, v = 0
        acc = tile.dot(tile.cast(p, v.dtype), v, acc, OPT)
    if OPT.NORMALIZE:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        unit = 1.0
        batch = tl.num_programs(0) // row_tiles // kv_heads
        row = ((split.to(tl.int64) * batch + b) * n + i) * kv_heads * OPT.GROUP + h
        tl.store(row_sums + 2 * row, total, mask=row_exists)
        tl.store(row_sums + 2 * row + 1, tl.where(total == 0.0, 0.0, row_shift * LN2), mask=row_exists)
    pointers = out + split.to(tl.int64) * out_split + b * out_strides.b
    pointers = pointers + i64[:, None] * out_strides.n + h64[:, None] * out_strides.h + offs_dv * out_strides.d
    tl.store(pointers, tile.cast(acc * unit, out.dtype.element_ty), mask=row_exists[:, None] & (offs_dv < OPT.DV))
