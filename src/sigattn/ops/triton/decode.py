"""The decoding kernel: few queries against a long cache of keys and values, in pages or not.

The queries of all heads that share a key head are packed into the rows of one tile, so that a key is read once for all
of them. The keys of a sample are split over programs, each of which writes a partial output; these simply add (Sect. 4:
nothing is normalised), in a fixed order, so results repeat bitwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigattn.ops.triton.activation import tanh
from sigattn.ops.triton.tile import assume_aligned, cast, dot, load_bias, load_shift, weights, zeros


@triton.jit(do_not_specialize=["n", "table_b", "pages", "page_size", "table_width", "left", "right", "splits"])
def decode_kernel(
    query, key, value, out, lengths, ends, first, table, bias, slopes, shift_pointer,
    q_b, q_n, q_h, q_d, k_p, k_n, k_h, k_d, v_p, v_n, v_h, v_d, o_s, o_b, o_n, o_h, o_d, table_b,
    bias_b, bias_h, bias_n, slopes_b, slopes_h, slopes_s,
    n, kv_heads, pages, page_size, table_width, left, right, splits, z_scale, bias_value, shift_value, cap_scale,
    mask, mask_b, mask_h, mask_n, mask_m, mask_keys,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr, ENDS: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr, SLOPES: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SHIFT: tl.constexpr, SIGMOID: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    WGMMA: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One tile of rows, (query, head of the group), against one part of the keys; launch_decode.py has the rest."""
    if UNIT != 1:
        q_b, q_h, q_n = assume_aligned(q_b, q_h, q_n, UNIT)
        k_p, k_h, k_n = assume_aligned(k_p, k_h, k_n, UNIT)
        v_p, v_h, v_n = assume_aligned(v_p, v_h, v_n, UNIT)
    row_tiles = tl.cdiv(n * GROUP, BLOCK_M)
    program, split = tl.program_id(0), tl.program_id(1)
    row_start = program % row_tiles * BLOCK_M
    b, h_kv = (program // row_tiles // kv_heads).to(tl.int64), program // row_tiles % kv_heads
    rows = row_start + tl.arange(0, BLOCK_M)
    some = rows < n * GROUP
    i = rows // GROUP
    h = h_kv * GROUP + rows % GROUP

    length = tl.minimum(tl.load(lengths + b).to(tl.int32), table_width * page_size)
    begin = 0
    if FIRST:
        begin = tl.maximum(tl.load(first + b).to(tl.int32), 0)
    end = length  # the last query beside the last key
    if ENDS:
        end = tl.load(ends + b).to(tl.int32)
    place = end - n + i
    start, stop = begin, length
    if HAS_LEFT:
        start = tl.maximum(begin, end - n + row_start // GROUP - left)
    if HAS_RIGHT:
        last = tl.minimum((row_start + BLOCK_M - 1) // GROUP, n - 1)
        stop = tl.minimum(length, end - n + last + right + 1)
    start = start // BLOCK_N * BLOCK_N
    each = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), BLOCK_N), splits) * BLOCK_N
    from_ = start + split * each
    to = tl.minimum(stop, from_ + each)

    features, outputs = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    at = query + b * q_b + i.to(tl.int64)[:, None] * q_n + h.to(tl.int64)[:, None] * q_h + features[None, :] * q_d
    q = tl.load(at, mask=some[:, None] & (features[None, :] < D), other=0.0)
    before, after = 0.0, 0.0
    if SLOPES:
        slope = slopes + b * slopes_b + h * slopes_h
        before = tl.load(slope, mask=some, other=0.0).to(tl.float32)[:, None]
        after = tl.load(slope + slopes_s, mask=some, other=0.0).to(tl.float32)[:, None]
    z_bias = load_bias(bias, bias_value, rows, n * GROUP, 0, 0, "number" if BIAS == "tensor" else BIAS)
    if BIAS == "tensor":
        own = bias + b * bias_b + h.to(tl.int64) * bias_h + i.to(tl.int64) * bias_n
        z_bias = tl.load(own, mask=some, other=0.0).to(tl.float32)[:, None] * -1.4426950408889634  # log₂e
    shift, unit = load_shift(shift_pointer, shift_value, 1, SHIFT)

    acc = zeros(BLOCK_M, BLOCK_DV, WGMMA)
    for column_start in tl.range(from_, to, BLOCK_N):
        columns = column_start + tl.arange(0, BLOCK_N)
        valid = (columns >= begin) & (columns < to)
        page, slot = b + tl.zeros_like(columns), columns
        if TABLE:
            page = tl.load(table + b * table_b + columns // page_size, mask=valid, other=0).to(tl.int64)
            slot = columns % page_size
            valid &= (page >= 0) & (page < pages)  # what a table should not name is not read
        key_at = key + page * k_p + slot.to(tl.int64) * k_n + h_kv.to(tl.int64) * k_h
        value_at = value + page * v_p + slot.to(tl.int64) * v_n + h_kv.to(tl.int64) * v_h
        k = tl.load(key_at[:, None] + features[None, :] * k_d, mask=valid[:, None] & (features[None, :] < D), other=0.0)
        v = tl.load(
            value_at[:, None] + outputs[None, :] * v_d, mask=valid[:, None] & (outputs[None, :] < DV), other=0.0
        )
        products = dot(q, tl.trans(k), None, PRECISION)
        if SOFTCAP:
            products = tanh(products * cap_scale)
        z_term = z_bias
        if MASK != "none":  # of the last mask_keys keys
            in_mask = columns - (length - mask_keys)
            masked = some[:, None] & (in_mask >= 0)[None, :] & (columns < length)[None, :]
            mask_at = mask + b * mask_b + h.to(tl.int64)[:, None] * mask_h + i.to(tl.int64)[:, None] * mask_n
            m = tl.load(mask_at + in_mask.to(tl.int64)[None, :] * mask_m, mask=masked, other=1 if MASK == "bool" else 0)
            if MASK == "added":
                m = m.to(tl.float32)
                z_term = z_bias - m * 1.4426950408889634  # log₂e
        p = weights(
            products, z_scale, z_term, place[:, None], columns[None, :], 1 << 30, 0, 0,
            left, right, before, after, query, 0, 0, unit, shift,
            True, HAS_LEFT, HAS_RIGHT, SLOPES, "none", SIGMOID, SHIFT,
        )  # (BLOCK_M, BLOCK_N)  # fmt: skip
        if MASK == "bool":
            p = tl.where(m != 0, p, 0.0)
        if MASK == "added":
            p = tl.where(m == float("-inf"), 0.0, p)
        acc = dot(cast(p, v.dtype), v, acc, PRECISION)  # what is not valid has v = 0
    to_ = out + split.to(tl.int64) * o_s + b * o_b
    to_ = to_ + i.to(tl.int64)[:, None] * o_n + h.to(tl.int64)[:, None] * o_h + outputs[None, :] * o_d
    tl.store(to_, cast(acc * unit, out.dtype.element_ty), mask=some[:, None] & (outputs[None, :] < DV))
