"""Backward kernels. No weights were saved by the forward pass: P is computed again from Q, K and the bias (App. F).

    dV = Pᵀ dO     dP = dO Vᵀ     dS = P ∘ (1 − P) ∘ dP     dQ = scale · dS K     dK = scale · dSᵀ Q

With a soft cap, s = scale · Q Kᵀ becomes c · tanh(s / c), and dS in dQ and dK is multiplied by 1 − tanh²(s / c).

``bwd_dkdv_kernel``: a program holds a tile of keys and walks the queries that see them; tiles are (keys, queries), so
that four of five products need no transpose. ``bwd_dq_kernel``: a program holds a tile of queries and walks the keys.
Both add in a fixed order, so results repeat bitwise. That is seven products; five, with dQ added atomically by the
first kernel, took longer on an H100 (but see ``hopper/backward_fused.py``).

With NORMALIZE, W = P / t is in dV and dS instead of P, where t is the sum of the row, and dO · O is subtracted from dP.
``bwd_dq_kernel`` runs first and computes what both need of a row.
"""

import triton
import triton.language as tl

from sigattn.ops.triton import rows, scores, tile
from sigattn.ops.triton.activation import logit_gradient, tanh_slope
from sigattn.ops.triton.args import Sizes

_UNSPECIALIZED = ["bias_b", "bias_h", "threshold", "len_q", "len_k", "heads", "query_offset", "left", "right"]


@triton.jit(do_not_specialize=[*_UNSPECIALIZED, "pitch"])
def bwd_dkdv_kernel(
    query, key, value, grad_out, row_terms, grad_key, grad_value,
    query_strides, key_strides, value_strides, grad_out_strides, grad_key_strides, grad_value_strides,
    bias, bias_b, bias_h, mask, alibi, blocks, sequences, seed, threshold,
    len_q, len_k, heads, query_offset, left, right, pitch, scales, OPT: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV, if not None, of BLOCK_N keys of one key head; args.py describes the arguments."""
    BLOCK_M: tl.constexpr = OPT.BLOCK_M
    BLOCK_N: tl.constexpr = OPT.BLOCK_N
    q_strides = tile.aligned(query_strides, OPT)
    k_strides = tile.aligned(key_strides, OPT)
    v_strides = tile.aligned(value_strides, OPT)
    o_strides = tile.aligned(grad_out_strides, OPT)
    tiles = tl.cdiv(len_k, BLOCK_N)
    program = tl.program_id(0)
    start_n = program % tiles * BLOCK_N  # under a causal mask the first keys have the most queries: they go first
    kv_heads = heads // OPT.GROUP
    b = (program // tiles // kv_heads).to(tl.int64)
    h_kv = (program // tiles % kv_heads).to(tl.int64)
    sizes = Sizes(len_q, len_k, heads, query_offset, left, right)
    q_start, k_start, sizes = tile.sample_sizes(b, sequences, sizes, OPT)
    if start_n >= sizes.len_k:
        return  # the gradients of keys beyond the last were set to 0
    if not OPT.TMA:
        query += b * q_strides.b + q_start * q_strides.n
        key = tile.of_head(key, k_strides, b, h_kv, k_start)
        value = tile.of_head(value, v_strides, b, h_kv, k_start)
        grad_out += b * o_strides.b + q_start * o_strides.n

    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = tile.load(key, k_strides, b, h_kv, start_n, sizes.len_k, BLOCK_N, OPT.D, True, OPT)  # [BLOCK_N, D]
    v = tile.load(value, v_strides, b, h_kv, start_n, sizes.len_k, BLOCK_N, OPT.DV, True, OPT)  # [BLOCK_N, DV]
    shift, unit = scores.load_shift(bias, sizes.len_k, OPT)
    lower, grad_unit = scores.gradient_shift(shift, OPT)
    if OPT.DROPOUT:
        seed = tl.load(seed)
        by_column = scores.column_hash(seed, offs_n, OPT)[:, None]
    # key j is seen by positions j - right … j + left
    first = start_n - sizes.query_offset
    last = tl.minimum(start_n + BLOCK_N, sizes.len_k) - sizes.query_offset
    bounds = tile.tile_bounds(first, last, sizes.len_q, right, left, BLOCK_M, OPT.HAS_RIGHT, OPT.HAS_LEFT)

    acc_k = tile.zero_accumulator(BLOCK_N, tile.tile_width(OPT.D), OPT.WGMMA)  # [BLOCK_N, D]
    acc_v = tile.zero_accumulator(BLOCK_N, tile.tile_width(OPT.DV), OPT.WGMMA)  # [BLOCK_N, DV]
    for phase in tl.static_range(0 if OPT.HAS_RIGHT else 1, 3):  # at an edge of the window, inside, at the other edge
        tiles = tl.cdiv(tl.maximum(bounds[phase + 1] - bounds[phase], 0), BLOCK_M)
        for step in tl.range(0, OPT.GROUP * tiles):  # of the query heads that share this key head, one after another
            h, start_m = h_kv, bounds[phase] + step * BLOCK_M
            if OPT.GROUP > 1:
                per_head = tl.maximum(tiles, 1)  # the compiler may compute the quotient before the loop's condition
                h, start_m = h_kv * OPT.GROUP + step // per_head, bounds[phase] + step % per_head * BLOCK_M
            state = scores.block_state(blocks, b, h, start_m, start_n, OPT)
            if not OPT.BLOCK_Q or state != 0:
                offs_m = start_m + tl.arange(0, BLOCK_M)
                query_h = query if OPT.TMA else query + h * q_strides.h
                grad_out_h = grad_out if OPT.TMA else grad_out + h * o_strides.h
                q = tile.load(query_h, q_strides, b, h, start_m, sizes.len_q, BLOCK_M, OPT.D, phase != 1, OPT)
                do = tile.load(grad_out_h, o_strides, b, h, start_m, sizes.len_q, BLOCK_M, OPT.DV, phase != 1, OPT)
                if OPT.NORMALIZE:
                    pointers = rows.term_pointers(row_terms, b, h, q_start, start_m, pitch, heads, OPT)
                    z_bias, gain, delta = rows.load_terms(pointers, start_m, sizes.len_q, BLOCK_M, phase != 1)
                else:
                    z_bias = scores.load_bias(bias, b * bias_b + h * bias_h, offs_m, sizes, OPT)
                    if OPT.BIAS == "tensor":
                        z_bias = z_bias[None, :]
                # [BLOCK_N, D] @ [D, BLOCK_M] -> [BLOCK_N, BLOCK_M]
                logits = scores.apply_softcap(tile.dot(k, tl.trans(q), None, OPT), scales, OPT)
                own_mask = mask if mask is None else scores.mask_of_head(mask, b, h)
                p = scores.weights(
                    logits, scales.z, z_bias, scores.load_slopes(alibi, b, h, OPT), shift, unit, offs_m[None, :],
                    offs_n[:, None], sizes, own_mask, blocks, state, phase != 1, OPT,
                )  # fmt: skip
                w = p * gain if OPT.NORMALIZE else p
                dropped = w
                if OPT.DROPOUT:
                    by_row = scores.row_hash(seed, b * heads + h, sizes.query_offset + offs_m, OPT)[None, :]
                    keep = scores.dropout_keep(by_row, by_column, threshold)
                    dropped = scores.select(keep, w, 0.0)
                if grad_value is not None:
                    # [BLOCK_N, BLOCK_M] @ [BLOCK_M, DV] -> [BLOCK_N, DV]; rows beyond the last have dO = 0
                    acc_v = tile.dot(tile.cast(dropped, do.dtype), do, acc_v, OPT)
                if grad_key is not None:
                    dp = tile.dot(v, tl.trans(do), None, OPT)  # [BLOCK_N, DV] @ [DV, BLOCK_M] -> [BLOCK_N, BLOCK_M]
                    if OPT.NORMALIZE:
                        if OPT.DROPOUT:
                            dp = tl.where(keep, dp, 0.0)
                        dp -= delta
                        ds = logit_gradient(w, p, dp, unit, lower, OPT.SHIFT != "none")
                    else:
                        ds = logit_gradient(dropped, p, dp, unit, lower, OPT.SHIFT != "none")
                    if OPT.SOFTCAP != "none":
                        ds = ds * tanh_slope(logits)
                    # [BLOCK_N, BLOCK_M] @ [BLOCK_M, D] -> [BLOCK_N, D]
                    acc_k = tile.dot(tile.cast(ds, q.dtype), q, acc_k, OPT)
    if OPT.MASK == "keys":
        visible = tile.visible_keys(scores.mask_of_head(mask, b, 0), offs_n, sizes.len_k)[:, None]
        acc_k, acc_v = tl.where(visible, acc_k, 0.0), tl.where(visible, acc_v, 0.0)
    if grad_key is not None:
        gk_strides = tile.aligned(grad_key_strides, OPT)
        grad_key = tile.of_head(grad_key, gk_strides, b, h_kv, k_start)
        tile.store(grad_key, gk_strides, acc_k * (scales.logit * grad_unit), start_n, sizes.len_k, OPT.D)
    if grad_value is not None:
        gv_strides = tile.aligned(grad_value_strides, OPT)
        grad_value = tile.of_head(grad_value, gv_strides, b, h_kv, k_start)
        tile.store(grad_value, gv_strides, acc_v * (scales.out * unit), start_n, sizes.len_k, OPT.DV)


@triton.jit(do_not_specialize=[*_UNSPECIALIZED, "pitch"])
def bwd_dq_kernel(
    query, key, value, grad_out, out, row_sums, row_terms, grad_query, grad_bias, grad_slopes, grad_mask,
    query_strides, key_strides, value_strides, grad_out_strides, out_strides, grad_query_strides,
    bias, bias_b, bias_h, mask, alibi, blocks, sequences, seed, threshold,
    len_q, len_k, heads, query_offset, left, right, pitch, scales, OPT: tl.constexpr,
):  # fmt: skip
    """Compute dQ, grad_bias (rows, Hq), grad_slopes (rows, Hq, 2) and grad_mask, if not None, of BLOCK_M queries.

    With NORMALIZE, out and row_sums are results of the forward pass, and row_terms receives bias, factor of the weights
    and dO · O of each row, for the other kernel.
    """
    BLOCK_M: tl.constexpr = OPT.BLOCK_M
    BLOCK_N: tl.constexpr = OPT.BLOCK_N
    q_strides = tile.aligned(query_strides, OPT)
    k_strides = tile.aligned(key_strides, OPT)
    v_strides = tile.aligned(value_strides, OPT)
    o_strides = tile.aligned(grad_out_strides, OPT)
    sizes = Sizes(len_q, len_k, heads, query_offset, left, right)
    b, h, h_kv, start_m, q_start, k_start, sizes = tile.query_tile(sequences, sizes, OPT)
    if OPT.VARLEN:
        if start_m >= sizes.len_q or start_m < 0:
            return
    if not OPT.TMA:
        query = tile.of_head(query, q_strides, b, h, q_start)
        key = tile.of_head(key, k_strides, b, h_kv, k_start)
        value = tile.of_head(value, v_strides, b, h_kv, k_start)
        grad_out = tile.of_head(grad_out, o_strides, b, h, q_start)
    if mask is not None:
        mask = scores.mask_of_head(mask, b, h)

    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = tile.load(query, q_strides, b, h, start_m, sizes.len_q, BLOCK_M, OPT.D, True, OPT)  # [BLOCK_M, D]
    do = tile.load(grad_out, o_strides, b, h, start_m, sizes.len_q, BLOCK_M, OPT.DV, True, OPT)  # [BLOCK_M, DV]
    z_bias = scores.load_bias(bias, b * bias_b + h * bias_h, offs_m, sizes, OPT)
    slopes = scores.load_slopes(alibi, b, h, OPT)
    shift, unit = scores.load_shift(bias, sizes.len_k, OPT)
    lower, grad_unit = scores.gradient_shift(shift, OPT)
    if OPT.NORMALIZE:
        out_strides = tile.aligned(out_strides, OPT)
        out = tile.of_head(out, out_strides, b, h, q_start)
        o = tile.load_rows(out, out_strides, start_m, sizes.len_q, BLOCK_M, OPT.DV, True)  # [BLOCK_M, DV]
        delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1) / scales.out
        pointers = rows.sum_pointers(row_sums, b, h, q_start, offs_m, len_q, heads, OPT)
        z_bias, gain = rows.divide_by_sums(pointers, z_bias, offs_m, sizes)
        if row_terms is not None:
            pointers = rows.term_pointers(row_terms, b, h, q_start, offs_m, pitch, heads, OPT)
            tl.store(pointers, z_bias, mask=offs_m < sizes.len_q)
            tl.store(pointers + 1, gain, mask=offs_m < sizes.len_q)
            tl.store(pointers + 2, delta, mask=offs_m < sizes.len_q)
        gain, delta = gain[:, None], (gain * delta)[:, None]
    if OPT.NORMALIZE or OPT.BIAS == "tensor":
        z_bias = z_bias[:, None]
    if OPT.DROPOUT:
        seed = tl.load(seed)
        by_row = scores.row_hash(seed, b * heads + h, sizes.query_offset + offs_m, OPT)[:, None]
    first = sizes.query_offset + start_m
    last = sizes.query_offset + tl.minimum(start_m + BLOCK_M, sizes.len_q)
    bounds = tile.tile_bounds(first, last, sizes.len_k, left, right, BLOCK_N, OPT.HAS_LEFT, OPT.HAS_RIGHT)

    acc = tile.zero_accumulator(BLOCK_M, tile.tile_width(OPT.D), OPT.WGMMA)  # [BLOCK_M, D]
    acc_bias = tl.zeros((BLOCK_M,), tl.float32)
    acc_before = tl.zeros((BLOCK_M,), tl.float32)
    acc_after = tl.zeros((BLOCK_M,), tl.float32)
    for phase in tl.static_range(0 if OPT.HAS_LEFT else 1, 3):  # at an edge of the window, inside, at the other edge
        for start_n in tl.range(bounds[phase], bounds[phase + 1], BLOCK_N):
            state = scores.block_state(blocks, b, h, start_m, start_n, OPT)
            if not OPT.BLOCK_Q or state != 0:
                offs_n = start_n + tl.arange(0, BLOCK_N)
                k, v = tile.load_keys(
                    key, value, k_strides, v_strides, mask, b, h_kv, start_n, offs_n, sizes.len_k, phase != 1, OPT
                )
                # [BLOCK_M, D] @ [D, BLOCK_N] -> [BLOCK_M, BLOCK_N]
                logits = scores.apply_softcap(tile.dot(q, tl.trans(k), None, OPT), scales, OPT)
                p = scores.weights(
                    logits, scales.z, z_bias, slopes, shift, unit, offs_m[:, None], offs_n[None, :], sizes, mask,
                    blocks, state, phase != 1, OPT,
                )  # fmt: skip
                # [BLOCK_M, DV] @ [DV, BLOCK_N] -> [BLOCK_M, BLOCK_N]; keys beyond the last have v = 0: no gradient
                dp = tile.dot(do, tl.trans(v), None, OPT)
                if OPT.DROPOUT:
                    keep = scores.dropout_keep(by_row, scores.column_hash(seed, offs_n, OPT)[None, :], threshold)
                    dp = tl.where(keep, dp, 0.0)
                if OPT.NORMALIZE:
                    dp = dp * gain - delta
                ds = logit_gradient(p, p, dp, unit, lower, OPT.SHIFT != "none")
                if grad_query is not None:
                    ds_capped = ds * tanh_slope(logits) if OPT.SOFTCAP != "none" else ds
                    # [BLOCK_M, BLOCK_N] @ [BLOCK_N, D] -> [BLOCK_M, D]
                    acc = tile.dot(tile.cast(ds_capped, k.dtype), k, acc, OPT)
                if grad_bias is not None:
                    acc_bias += tl.sum(ds, 1)
                if grad_slopes is not None:
                    distance = (sizes.query_offset + offs_m[:, None] - offs_n[None, :]).to(tl.float32)
                    acc_before += tl.sum(tl.where(distance > 0, -distance * ds, 0.0), 1)
                    acc_after += tl.sum(tl.where(distance < 0, distance * ds, 0.0), 1)
                if grad_mask is not None:
                    own_mask = scores.mask_of_head(grad_mask, b, h)
                    add_to_mask(own_mask, ds * (scales.out * grad_unit), offs_m, offs_n, sizes, OPT)
    if grad_query is not None:
        gq_strides = tile.aligned(grad_query_strides, OPT)
        grad_query = tile.of_head(grad_query, gq_strides, b, h, q_start)
        tile.store(grad_query, gq_strides, acc * (scales.logit * grad_unit), start_m, sizes.len_q, OPT.D)
    row_heads = ((q_start if OPT.VARLEN else b * len_q) + offs_m) * heads + h  # [BLOCK_M]
    if grad_bias is not None:
        tl.store(grad_bias + row_heads, acc_bias * (scales.out * grad_unit), mask=offs_m < sizes.len_q)
    if grad_slopes is not None:
        tl.store(grad_slopes + 2 * row_heads, acc_before * (scales.out * grad_unit), mask=offs_m < sizes.len_q)
        tl.store(grad_slopes + 2 * row_heads + 1, acc_after * (scales.out * grad_unit), mask=offs_m < sizes.len_q)


@triton.jit
def add_to_mask(grad_mask, ds, offs_m, offs_n, sizes, OPT: tl.constexpr):
    """Add a tile of dS, [BLOCK_M, BLOCK_N], to the gradient of the mask, summed along its broadcast axes."""
    inside = (offs_m[:, None] < sizes.len_q) & (offs_n[None, :] < sizes.len_k)
    ds = tl.where(inside, ds, 0.0)
    row_pointers = grad_mask.pointer + offs_m.to(tl.int64) * grad_mask.q
    columns = offs_n.to(tl.int64) * grad_mask.k
    if OPT.NEED_MASK == "stored":
        tl.store(row_pointers[:, None] + columns[None, :], ds, mask=inside)
    elif OPT.SUM_ROWS and OPT.SUM_COLUMNS:
        tl.atomic_add(grad_mask.pointer, tl.sum(ds), sem="relaxed")
    elif OPT.SUM_ROWS:
        tl.atomic_add(grad_mask.pointer + columns, tl.sum(ds, 0), mask=offs_n < sizes.len_k, sem="relaxed")
    elif OPT.SUM_COLUMNS:
        tl.atomic_add(row_pointers, tl.sum(ds, 1), mask=offs_m < sizes.len_q, sem="relaxed")
    else:
        tl.atomic_add(row_pointers[:, None] + columns[None, :], ds, mask=inside, sem="relaxed")
