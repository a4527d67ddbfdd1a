"""The backward kernels. Nothing is prepared and nothing was saved: P is made anew from Q, K and the bias (App. F).

    dV = Pᵀ dO     dP = dO Vᵀ     dS = P ∘ (1 − P) ∘ dP     dQ = scale · dS K     dK = scale · dSᵀ Q

With SOFTCAP, s = scale · Q Kᵀ becomes c · tanh(s / c), and dS in dQ and dK is multiplied by 1 − tanh²(s / c).

``bwd_dkdv_kernel``: a program holds a tile of keys and walks the queries that see them, adding dK and dV; tiles stand
as (keys, queries), so that four of five products need no transpose. ``bwd_dq_kernel``: a program holds a tile of
queries and walks the keys, adding dQ and the gradients of bias, slopes and mask. Both add in a fixed order, hence
repeat bitwise. With ``ATOMIC_DQ`` the first kernel adds dQ too, atomically, saving two of seven products at the price
of that order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigattn.ops.triton.activation import logit_gradient, tanh, tanh_slope
from sigattn.ops.triton.tile import (
    assume_aligned,
    block_state,
    cast,
    column_hash,
    dot,
    dropout_keep,
    gradient_shift,
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
def bwd_dkdv_kernel(
    query, key, value, grad_out, grad_query, grad_key, grad_value,
    bias, mask, slopes, key_lengths, starts_q, starts_k, shift_pointer,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n, o_d,
    gq_b, gq_h, gq_n, gq_d, gk_b, gk_h, gk_n, gk_d, gv_b, gv_h, gv_n, gv_d,
    bias_b, bias_h, bias_n, mask_b, mask_h, mask_n, mask_m, slopes_b, slopes_h, slopes_s,
    n, keys, heads, query_offset, left, right, seed, threshold,
    z_scale, bias_value, shift_value, out_scale, logit_scale, cap_scale,
    block_table, block_tiles, blocks_b, blocks_h, blocks_n,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, SLOPES: tl.constexpr, LENGTHS: tl.constexpr, VARLEN: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    SHIFT: tl.constexpr, SIGMOID: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WGMMA: tl.constexpr,
    UNIT: tl.constexpr,
    NEED_KEY: tl.constexpr, NEED_VALUE: tl.constexpr, ATOMIC_DQ: tl.constexpr,
):  # fmt: skip
    """The gradients dK and dV of one tile of BLOCK_N keys of one key head; kernel_args.py describes the arguments."""
    if UNIT != 1:
        q_b, q_h, q_n = assume_aligned(q_b, q_h, q_n, UNIT)
        k_b, k_h, k_n = assume_aligned(k_b, k_h, k_n, UNIT)
        v_b, v_h, v_n = assume_aligned(v_b, v_h, v_n, UNIT)
        o_b, o_h, o_n = assume_aligned(o_b, o_h, o_n, UNIT)
        gk_b, gk_h, gk_n = assume_aligned(gk_b, gk_h, gk_n, UNIT)
        gv_b, gv_h, gv_n = assume_aligned(gv_b, gv_h, gv_n, UNIT)
    tiles = tl.cdiv(keys, BLOCK_N)
    program = tl.program_id(0)
    column_start = program % tiles * BLOCK_N  # under a causal mask the first keys have the most to do: they go first
    kv_heads = heads // GROUP
    b = (program // tiles // kv_heads).to(tl.int64)
    h_kv = (program // tiles % kv_heads).to(tl.int64)
    if not TMA:
        key += b * k_b + h_kv * k_h
        value += b * v_b + h_kv * v_h
    if NEED_KEY:
        grad_key += b * gk_b + h_kv * gk_h
    if NEED_VALUE:
        grad_value += b * gv_b + h_kv * gv_h
    if LENGTHS:
        keys = tl.minimum(tl.load(key_lengths + b).to(tl.int32), keys)
    from_q = tl.zeros((), tl.int64)
    if VARLEN:
        from_q, from_k = tl.load(starts_q + b).to(tl.int64), tl.load(starts_k + b).to(tl.int64)
        n = (tl.load(starts_q + b + 1).to(tl.int64) - from_q).to(tl.int32)
        keys = (tl.load(starts_k + b + 1).to(tl.int64) - from_k).to(tl.int32)
        key += from_k * k_n
        value += from_k * v_n
        if NEED_KEY:
            grad_key += from_k * gk_n
        if NEED_VALUE:
            grad_value += from_k * gv_n
    if column_start >= keys:
        return  # the gradients beyond are 0 from the start
    if BOTTOM_RIGHT:
        query_offset = keys - n

    columns = column_start + tl.arange(0, BLOCK_N)
    k = load(key, b, h_kv, column_start, keys, k_n, k_d, BLOCK_N, D, BLOCK_D, True, TMA)
    v = load(value, b, h_kv, column_start, keys, v_n, v_d, BLOCK_N, DV, BLOCK_DV, True, TMA)
    shift, unit = load_shift(shift_pointer, shift_value, keys, SHIFT)
    lower, grad_unit = gradient_shift(shift, SHIFT)
    if DROPOUT:
        seed = tl.load(seed)
    by_column = column_hash(seed, columns)[:, None] if DROPOUT else 0
    # key j is seen by places j - right … j + left
    first = column_start - query_offset
    last = tl.minimum(column_start + BLOCK_N, keys) - query_offset
    start, full_start, full_stop, stop = tile_bounds(first, last, n, right, left, BLOCK_M, HAS_RIGHT, HAS_LEFT)

    if not TMA:
        query += b * q_b + from_q * q_n
        grad_out += b * o_b + from_q * o_n
    acc_k = zeros(BLOCK_N, BLOCK_D, WGMMA)
    acc_v = zeros(BLOCK_N, BLOCK_DV, WGMMA)
    for phase in tl.static_range(3):
        if phase != 0 or HAS_RIGHT:
            from_, to = start, full_start
            if phase == 1:
                from_, to = full_start, full_stop
            if phase == 2:
                from_, to = full_stop, stop
            steps = tl.cdiv(tl.maximum(to - from_, 0), BLOCK_M)
            for step in tl.range(0, GROUP * steps):  # of the query heads that share this key head, one after another
                h, row_start = h_kv, from_ + step * BLOCK_M
                if GROUP > 1:
                    h, row_start = h_kv * GROUP + step // steps, from_ + step % steps * BLOCK_M
                if BLOCKS:
                    own_table = block_table + b * blocks_b + h * blocks_h
                    state = block_state(own_table, row_start, column_start, blocks_n, BLOCK_Q, BLOCK_K)
                if not BLOCKS or state != 0:
                    bias_here = bias + b * bias_b + h * bias_h if BIAS == "tensor" else bias
                    before, after = 0.0, 0.0
                    if SLOPES:
                        at = slopes + b * slopes_b + h * slopes_h
                        before, after = tl.load(at).to(tl.float32), tl.load(at + slopes_s).to(tl.float32)
                    rows = row_start + tl.arange(0, BLOCK_M)
                    query_h = query if TMA else query + h * q_h
                    grad_out_h = grad_out if TMA else grad_out + h * o_h
                    q = load(query_h, b, h, row_start, n, q_n, q_d, BLOCK_M, D, BLOCK_D, phase != 1, TMA)
                    do = load(grad_out_h, b, h, row_start, n, o_n, o_d, BLOCK_M, DV, BLOCK_DV, phase != 1, TMA)
                    z_bias = load_bias(bias_here, bias_value, rows, n, keys, bias_n, BIAS)
                    if BIAS == "tensor":
                        z_bias = z_bias[None, :]
                    products = dot(k, tl.trans(q), None, PRECISION)
                    if SOFTCAP:
                        products = tanh(products * cap_scale)
                    p = weights(
                        products, z_scale, z_bias, rows[None, :], columns[:, None], n, keys, query_offset,
                        left, right, before, after, mask + b * mask_b + h * mask_h, mask_n, mask_m, unit, shift,
                        phase != 1, HAS_LEFT, HAS_RIGHT, SLOPES, MASK, SIGMOID, SHIFT,
                    )  # (BLOCK_N, BLOCK_M)  # fmt: skip
                    if BLOCKS:
                        visible = load_block_mask(block_tiles, state, rows[None, :], columns[:, None], BLOCK_Q, BLOCK_K)
                        p = tl.where(visible, p, 0.0)
                    dropped = p
                    if DROPOUT:
                        by_row = row_hash(seed, (b * heads + h).to(tl.int64), query_offset + rows)[None, :]
                        keep = dropout_keep(by_row, by_column, threshold)
                        dropped = tl.where(keep, p, 0.0)
                    if NEED_VALUE:  # rows beyond the last have dO = 0
                        acc_v = dot(cast(dropped, do.dtype), do, acc_v, PRECISION)
                    if NEED_KEY or ATOMIC_DQ:
                        dp = dot(v, tl.trans(do), None, PRECISION)
                        if DROPOUT:
                            dp = tl.where(keep, dp, 0.0)
                        ds = logit_gradient(p, dp, unit, lower, SHIFT != "none")  # (BLOCK_N, BLOCK_M)
                        if SOFTCAP:
                            ds = ds * tanh_slope(products)
                        ds = cast(ds, q.dtype)
                        if NEED_KEY:
                            acc_k = dot(ds, q, acc_k, PRECISION)
                        if ATOMIC_DQ:
                            dq = dot(tl.trans(ds), k, None, PRECISION)
                            dq_columns = tl.arange(0, BLOCK_D)[None, :]
                            at = grad_query + b * gq_b + h * gq_h + from_q * gq_n
                            at += rows[:, None].to(tl.int64) * gq_n + dq_columns * gq_d
                            inside = (rows[:, None] < n) & (dq_columns < D)
                            tl.atomic_add(at, dq * (logit_scale * grad_unit), mask=inside, sem="relaxed")
    if NEED_KEY:
        store(grad_key, acc_k * (logit_scale * grad_unit), column_start, keys, gk_n, gk_d, BLOCK_N, D, BLOCK_D)
    if NEED_VALUE:
        store(grad_value, acc_v * (out_scale * unit), column_start, keys, gv_n, gv_d, BLOCK_N, DV, BLOCK_DV)


@triton.jit(
    do_not_specialize=["n", "keys", "query_offset", "left", "right", "threshold", "bias_b", "bias_h", "gb_b", "gb_h"]
)
def bwd_dq_kernel(
    query, key, value, grad_out, grad_query, grad_bias, grad_slopes, grad_mask,
    bias, mask, slopes, key_lengths, starts_q, starts_k, shift_pointer,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n, o_d,
    gq_b, gq_h, gq_n, gq_d, gb_b, gb_h, gb_n, gm_b, gm_h, gm_n, gm_m,
    bias_b, bias_h, bias_n, mask_b, mask_h, mask_n, mask_m, slopes_b, slopes_h, slopes_s,
    n, keys, heads, query_offset, left, right, seed, threshold,
    z_scale, bias_value, shift_value, out_scale, logit_scale, cap_scale,
    block_table, block_tiles, blocks_b, blocks_h, blocks_n,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, SLOPES: tl.constexpr, LENGTHS: tl.constexpr, VARLEN: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    SHIFT: tl.constexpr, SIGMOID: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WGMMA: tl.constexpr,
    UNIT: tl.constexpr,
    NEED_QUERY: tl.constexpr, NEED_BIAS: tl.constexpr, NEED_SLOPES: tl.constexpr, NEED_MASK: tl.constexpr,
    SUM_ROWS: tl.constexpr, SUM_COLUMNS: tl.constexpr,
):  # fmt: skip
    """dQ, and the sums of dS, of one tile of BLOCK_M queries of one head; kernel_args.py says what the arguments are.

    NEED_MASK: "none", "stored" (every entry of grad_mask has one writer) or "added" (atomically, for the mask is
    broadcast; along queries where SUM_ROWS, along keys where SUM_COLUMNS).
    """
    if UNIT != 1:
        q_b, q_h, q_n = assume_aligned(q_b, q_h, q_n, UNIT)
        k_b, k_h, k_n = assume_aligned(k_b, k_h, k_n, UNIT)
        v_b, v_h, v_n = assume_aligned(v_b, v_h, v_n, UNIT)
        o_b, o_h, o_n = assume_aligned(o_b, o_h, o_n, UNIT)
        gq_b, gq_h, gq_n = assume_aligned(gq_b, gq_h, gq_n, UNIT)
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
        grad_out += b * o_b + h * o_h
    if NEED_QUERY:
        grad_query += b * gq_b + h * gq_h
    if NEED_BIAS:
        grad_bias += b * gb_b + h * gb_h
    if NEED_SLOPES:
        grad_slopes += 2 * (b * gb_b + h * gb_h)
    if NEED_MASK != "none":
        grad_mask += b * gm_b + h * gm_h
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
        grad_out += from_q * o_n
        if NEED_QUERY:
            grad_query += from_q * gq_n
        if NEED_BIAS:
            grad_bias += from_q * gb_n
        if NEED_SLOPES:
            grad_slopes += 2 * from_q * gb_n
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
    do = load(grad_out, b, h, row_start, n, o_n, o_d, BLOCK_M, DV, BLOCK_DV, True, TMA)
    z_bias = load_bias(bias, bias_value, rows, n, keys, bias_n, BIAS)
    if BIAS == "tensor":
        z_bias = z_bias[:, None]
    shift, unit = load_shift(shift_pointer, shift_value, keys, SHIFT)
    lower, grad_unit = gradient_shift(shift, SHIFT)
    if DROPOUT:
        seed = tl.load(seed)
    by_row = row_hash(seed, head, query_offset + rows)[:, None] if DROPOUT else 0
    first = query_offset + row_start
    last = query_offset + tl.minimum(row_start + BLOCK_M, n)
    start, full_start, full_stop, stop = tile_bounds(first, last, keys, left, right, BLOCK_N, HAS_LEFT, HAS_RIGHT)

    acc = zeros(BLOCK_M, BLOCK_D, WGMMA)
    acc_bias = tl.zeros((BLOCK_M,), tl.float32)
    acc_before = tl.zeros((BLOCK_M,), tl.float32)
    acc_after = tl.zeros((BLOCK_M,), tl.float32)
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
                    dp = dot(do, tl.trans(v), None, PRECISION)  # keys beyond the last have v = 0: no gradient
                    if DROPOUT:
                        by_column = column_hash(seed, columns)[None, :]
                        dp = tl.where(dropout_keep(by_row, by_column, threshold), dp, 0.0)
                    ds = logit_gradient(p, dp, unit, lower, SHIFT != "none")  # (BLOCK_M, BLOCK_N)
                    if NEED_QUERY:
                        of_product = ds
                        if SOFTCAP:
                            of_product = ds * tanh_slope(products)
                        acc = dot(cast(of_product, k.dtype), k, acc, PRECISION)
                    if NEED_BIAS:
                        acc_bias += tl.sum(ds, 1)
                    if NEED_SLOPES:
                        distance = (query_offset + rows[:, None] - columns[None, :]).to(tl.float32)
                        acc_before += tl.sum(tl.where(distance > 0, -distance * ds, 0.0), 1)
                        acc_after += tl.sum(tl.where(distance < 0, distance * ds, 0.0), 1)
                    if NEED_MASK != "none":
                        add_to_mask(
                            grad_mask, ds * (out_scale * grad_unit), rows, columns, n, keys, gm_n, gm_m,
                            NEED_MASK, SUM_ROWS, SUM_COLUMNS,
                        )  # fmt: skip
    if NEED_QUERY:
        store(grad_query, acc * (logit_scale * grad_unit), row_start, n, gq_n, gq_d, BLOCK_M, D, BLOCK_D)
    if NEED_BIAS:
        tl.store(grad_bias + rows.to(tl.int64) * gb_n, acc_bias * (out_scale * grad_unit), mask=rows < n)
    if NEED_SLOPES:
        at = grad_slopes + 2 * rows.to(tl.int64) * gb_n
        tl.store(at, acc_before * (out_scale * grad_unit), mask=rows < n)
        tl.store(at + 1, acc_after * (out_scale * grad_unit), mask=rows < n)


@triton.jit
def add_to_mask(
    grad_mask, ds, rows, columns, n, keys, gm_n, gm_m,
    NEED_MASK: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add a tile of dS to the mask's gradient, summed along what the mask is broadcast along."""
    inside = (rows[:, None] < n) & (columns[None, :] < keys)
    ds = tl.where(inside, ds, 0.0)
    row_at = rows.to(tl.int64) * gm_n
    column_at = columns.to(tl.int64) * gm_m
    if NEED_MASK == "stored":
        tl.store(grad_mask + row_at[:, None] + column_at[None, :], ds, mask=inside)
    elif SUM_ROWS and SUM_COLUMNS:
        tl.atomic_add(grad_mask, tl.sum(ds), sem="relaxed")
    elif SUM_ROWS:
        tl.atomic_add(grad_mask + column_at, tl.sum(ds, 0), mask=columns < keys, sem="relaxed")
    elif SUM_COLUMNS:
        tl.atomic_add(grad_mask + row_at, tl.sum(ds, 1), mask=rows < n, sem="relaxed")
    else:
        tl.atomic_add(grad_mask + row_at[:, None] + column_at[None, :], ds, mask=inside, sem="relaxed")
