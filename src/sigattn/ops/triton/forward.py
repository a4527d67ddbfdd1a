"""The forward kernel: a program holds a tile of queries and walks the keys they see, adding P V.

Nothing is carried from tile to tile but the sum: no running maximum, no rescaling, nothing to divide by in the end
(Sect. 4 and App. F of the paper). Tiles outside the window are not visited, and those inside it carry no mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigattn.ops.triton.activation import tanh
from sigattn.ops.triton.tile import (
    assume_aligned,
    block_state,
    cast,
    column_hash,
    dot,
    dropout_keep,
    load,
    load_bias,
    load_block_mask,
    load_shift,
    row_hash,
    store,
    tile_bounds,
    weights,
    zeros,
)


@triton.jit(do_not_specialize=["n", "keys", "query_offset", "left", "right", "threshold", "bias_b", "bias_h"])
def fwd_kernel(
    query, key, value, out, bias, mask, slopes, key_lengths, starts_q, starts_k, shift_pointer,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n, o_d,
    bias_b, bias_h, bias_n, mask_b, mask_h, mask_n, mask_m, slopes_b, slopes_h, slopes_s,
    n, keys, heads, query_offset, left, right, seed, threshold, z_scale, bias_value, shift_value, out_scale, cap_scale,
    block_table, block_tiles, blocks_b, blocks_h, blocks_n,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, SLOPES: tl.constexpr, LENGTHS: tl.constexpr, VARLEN: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    SHIFT: tl.constexpr, SIGMOID: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WGMMA: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M queries of one head; kernel_args.py says what the arguments are."""
    if UNIT != 1:
        q_b, q_h, q_n = assume_aligned(q_b, q_h, q_n, UNIT)
        k_b, k_h, k_n = assume_aligned(k_b, k_h, k_n, UNIT)
        v_b, v_h, v_n = assume_aligned(v_b, v_h, v_n, UNIT)
        o_b, o_h, o_n = assume_aligned(o_b, o_h, o_n, UNIT)
    tiles = tl.cdiv(n, BLOCK_M)
    program = tl.program_id(0)
    head = program // tiles  # b·Hq + h
    # under a causal mask the last queries have the most to do: they go first
    row_start = (tiles - 1 - program % tiles) * BLOCK_M if HAS_RIGHT else program % tiles * BLOCK_M
    b, h = (head // heads).to(tl.int64), head % heads
    h_kv = (h // GROUP).to(tl.int64)
    h = h.to(tl.int64)
    if not TMA:
        query += b * q_b + h * q_h
        key += b * k_b + h_kv * k_h
        value += b * v_b + h_kv * v_h
    out += b * o_b + h * o_h
    if BIAS == "tensor":
        bias += b * bias_b + h * bias_h
    if MASK != "none":
        mask += b * mask_b + h * mask_h
    if BLOCKS:
        block_table += b * blocks_b + h * blocks_h
    if LENGTHS:
        keys = tl.minimum(tl.load(key_lengths + b).to(tl.int32), keys)
    if VARLEN:
        from_q, from_k = tl.load(starts_q + b).to(tl.int64), tl.load(starts_k + b).to(tl.int64)
        n = (tl.load(starts_q + b + 1).to(tl.int64) - from_q).to(tl.int32)
        keys = (tl.load(starts_k + b + 1).to(tl.int64) - from_k).to(tl.int32)
        query += from_q * q_n
        key += from_k * k_n
        value += from_k * v_n
        out += from_q * o_n
        if HAS_RIGHT:
            row_start = (tl.cdiv(n, BLOCK_M) - 1 - program % tiles) * BLOCK_M
        if row_start >= n or row_start < 0:
            return
    if BOTTOM_RIGHT:
        query_offset = keys - n
    before, after = 0.0, 0.0
    if SLOPES:
        slopes += b * slopes_b + h * slopes_h
        before, after = tl.load(slopes).to(tl.float32), tl.load(slopes + slopes_s).to(tl.float32)

    rows = row_start + tl.arange(0, BLOCK_M)
    q = load(query, b, h, row_start, n, q_n, q_d, BLOCK_M, D, BLOCK_D, True, TMA)
    z_bias = load_bias(bias, bias_value, rows, n, keys, bias_n, BIAS)
    if BIAS == "tensor":
        z_bias = z_bias[:, None]
    shift, unit = load_shift(shift_pointer, shift_value, keys, SHIFT)
    if DROPOUT:
        seed = tl.load(seed)
    by_row = row_hash(seed, head, query_offset + rows)[:, None] if DROPOUT else 0
    first = query_offset + row_start
    last = query_offset + tl.minimum(row_start + BLOCK_M, n)
    start, full_start, full_stop, stop = tile_bounds(first, last, keys, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT)

    acc = zeros(BLOCK_M, BLOCK_DV, WGMMA)
    for phase in tl.static_range(3):
        if phase != 0 or HAS_LEFT:
            from_, to = start, full_start
            if phase == 1:
                from_, to = full_start, full_stop
            if phase == 2:
                from_, to = full_stop, stop
            for column_start in tl.range(from_, to, BLOCK_N):
                if BLOCKS:
                    state = block_state(block_table, row_start, column_start, blocks_n, BLOCK_Q, BLOCK_K)
                if not BLOCKS or state != 0:
                    k = load(key, b, h_kv, column_start, keys, k_n, k_d, BLOCK_N, D, BLOCK_D, phase != 1, TMA)
                    v = load(value, b, h_kv, column_start, keys, v_n, v_d, BLOCK_N, DV, BLOCK_DV, phase != 1, TMA)
                    columns = column_start + tl.arange(0, BLOCK_N)
                    products = dot(q, tl.trans(k), None, PRECISION)
                    if SOFTCAP:
                        products = tanh(products * cap_scale)
                    if BLOCKS:  # a masked NaN must not meet the neighbour that it shares a reciprocal with
                        visible = load_block_mask(block_tiles, state, rows[:, None], columns[None, :], BLOCK_Q, BLOCK_K)
                        products = tl.where(visible, products, 0.0)
                    p = weights(
                        products, z_scale, z_bias, rows[:, None], columns[None, :], n, keys, query_offset,
                        left, right, before, after, mask, mask_n, mask_m, unit, shift,
                        phase != 1, HAS_LEFT, HAS_RIGHT, SLOPES, MASK, SIGMOID, SHIFT,
                    )  # (BLOCK_M, BLOCK_N)  # fmt: skip
                    if BLOCKS:
                        p = tl.where(visible, p, 0.0)
                    if DROPOUT:
                        by_column = column_hash(seed, columns)[None, :]
                        p = tl.where(dropout_keep(by_row, by_column, threshold), p, 0.0)
                    acc = dot(cast(p, v.dtype), v, acc, PRECISION)  # keys beyond the last have v = 0
    acc = acc * (out_scale * unit)
    store(out, acc, row_start, n, o_n, o_d, BLOCK_M, DV, BLOCK_DV)
