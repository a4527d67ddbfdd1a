"""Forward kernel: a program holds a tile of queries, walks the keys that they see, and adds P V.

Only the sum is carried from tile to tile: no running maximum, no rescaling (Sect. 4 and App. F of the paper). Tiles
outside the window are not visited, and tiles entirely inside it have no mask.

With NORMALIZE the sum of the weights is carried too, and divides at the end. In the rare tiles where it underflows in a
row, the keys are walked again, with an exponent for each row that follows its least z.
"""

import triton
import triton.language as tl

from sigattn.ops.triton import rows, scores, tile
from sigattn.ops.triton.activation import LN2
from sigattn.ops.triton.args import Sizes


@triton.jit
def walk_keys(
    q, key, value, k_strides, v_strides, mask, blocks, b, h, h_kv, start_m, offs_m, bounds, z_bias, slopes, shift, unit,
    by_row, seed, threshold, sizes, scales, LIFTED: tl.constexpr, OPT: tl.constexpr,
):  # fmt: skip
    """Return the sum of P V over the keys, with NORMALIZE that of P, and the logarithm of P's factor."""
    BLOCK_M: tl.constexpr = OPT.BLOCK_M  # Triton 3.6 takes no field of a tuple in a shape
    acc = tile.zero_accumulator(BLOCK_M, tile.tile_width(OPT.DV), OPT.WGMMA)
    sums = tl.zeros((BLOCK_M, 4), tl.float32)
    row_shift = tl.zeros((BLOCK_M,), tl.float32) + (rows.LARGEST_Z if LIFTED else shift)
    # At an edge of the window, inside, at the other edge; the rare lifted walk is one loop
    for phase in tl.static_range(2 if LIFTED else 0 if OPT.HAS_LEFT else 1, 3):
        for start_n in tl.range(bounds[0] if LIFTED else bounds[phase], bounds[phase + 1], OPT.BLOCK_N):
            state = scores.block_state(blocks, b, h, start_m, start_n, OPT)
            if not OPT.BLOCK_Q or state != 0:
                offs_n = start_n + tl.arange(0, OPT.BLOCK_N)
                k, v = tile.load_keys(
                    key, value, k_strides, v_strides, mask, b, h_kv, start_n, offs_n, sizes.len_k, phase != 1, OPT
                )
                # [BLOCK_M, D] @ [D, BLOCK_N] -> [BLOCK_M, BLOCK_N]
                logits = scores.apply_softcap(tile.dot(q, tl.trans(k), None, OPT), scales, OPT)
                p = scores.weights(
                    logits, scales.z, z_bias, slopes, shift, unit, offs_m[:, None], offs_n[None, :], sizes, mask,
                    blocks, state, phase != 1, OPT, LIFTED,
                )  # fmt: skip
                if LIFTED:
                    p, row_shift, rescale = rows.lifted_weights(p, row_shift, shift, OPT)
                    acc *= rescale[:, None]
                    sums *= rescale[:, None]
                if OPT.NORMALIZE:
                    sums = rows.add_to_sums(sums, p)
                if OPT.DROPOUT:
                    keep = scores.dropout_keep(by_row, scores.column_hash(seed, offs_n, OPT)[None, :], threshold)
                    p = scores.select(keep, p, 0.0)
                # [BLOCK_M, BLOCK_N] @ [BLOCK_N, DV] -> [BLOCK_M, DV]; keys beyond the last have v = 0
                acc = tile.dot(tile.cast(p, v.dtype), v, acc, OPT)
    lift = row_shift * LN2
    if LIFTED:
        lift = tl.where(row_shift > shift, tl.floor(lift + 0.5), lift)
    return acc, tl.sum(sums, 1), lift


@triton.jit
def any_underflows(total, offs_m, bounds, sizes, OPT: tl.constexpr):
    """Return True if the sum of a row that sees keys is so small that its weights have lost bits."""
    # The paired form of σ is at least 2^-60; weights of float16 have all their bits from 2^-14 on
    least = (bounds[3] - bounds[0]) * (2.0**-48 if OPT.SHIFT == "none" else 2.0**-14)
    is_small = (total < least) & (offs_m < sizes.len_q)
    if OPT.SIGMOID != "exact" and OPT.SIGMOID != "rcp":
        is_small &= total > 0.0  # which is 0 only if the row sees no key
    return tl.max(is_small.to(tl.int32), 0) > 0


@triton.jit(
    do_not_specialize=["bias_b", "bias_h", "threshold", "len_q", "len_k", "heads", "query_offset", "left", "right"]
)
def fwd_kernel(
    query, key, value, out, row_sums, query_strides, key_strides, value_strides, out_strides,
    bias, bias_b, bias_h, mask, alibi, blocks, sequences, seed, threshold,
    len_q, len_k, heads, query_offset, left, right, scales, OPT: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M queries of one head of the output; args.py describes the arguments.

    row_sums: with NORMALIZE the sum of each row's weights times a factor, and the factor's logarithm.
    """
    q_strides = tile.aligned(query_strides, OPT)
    k_strides = tile.aligned(key_strides, OPT)
    v_strides = tile.aligned(value_strides, OPT)
    o_strides = tile.aligned(out_strides, OPT)
    sizes = Sizes(len_q, len_k, heads, query_offset, left, right)
    b, h, h_kv, start_m, q_start, k_start, sizes = tile.query_tile(sequences, sizes, OPT)
    if OPT.VARLEN:
        if start_m >= sizes.len_q or start_m < 0:
            return
    if not OPT.TMA:
        query = tile.of_head(query, q_strides, b, h, q_start)
        key = tile.of_head(key, k_strides, b, h_kv, k_start)
        value = tile.of_head(value, v_strides, b, h_kv, k_start)
    out = tile.of_head(out, o_strides, b, h, q_start)
    if mask is not None:
        mask = scores.mask_of_head(mask, b, h)

    offs_m = start_m + tl.arange(0, OPT.BLOCK_M)
    q = tile.load(query, q_strides, b, h, start_m, sizes.len_q, OPT.BLOCK_M, OPT.D, True, OPT)  # [BLOCK_M, D]
    z_bias = scores.load_bias(bias, b * bias_b + h * bias_h, offs_m, sizes, OPT)
    if OPT.BIAS == "tensor":
        z_bias = z_bias[:, None]
    slopes = scores.load_slopes(alibi, b, h, OPT)
    shift, unit = scores.load_shift(bias, sizes.len_k, OPT)
    by_row = 0
    if OPT.DROPOUT:
        seed = tl.load(seed)
        by_row = scores.row_hash(seed, b * heads + h, sizes.query_offset + offs_m, OPT)[:, None]
    first = sizes.query_offset + start_m
    last = sizes.query_offset + tl.minimum(start_m + OPT.BLOCK_M, sizes.len_q)
    bounds = tile.tile_bounds(first, last, sizes.len_k, left, right, OPT.BLOCK_N, OPT.HAS_LEFT, OPT.HAS_RIGHT)

    if OPT.REPAIR:
        pointers = rows.sum_pointers(row_sums, b, h, q_start, offs_m, len_q, heads, OPT)
        if not any_underflows(tl.load(pointers, mask=offs_m < sizes.len_q, other=0.0), offs_m, bounds, sizes, OPT):
            return
    acc, total, lift = walk_keys(
        q, key, value, k_strides, v_strides, mask, blocks, b, h, h_kv, start_m, offs_m, bounds, z_bias, slopes, shift,
        unit, by_row, seed, threshold, sizes, scales, OPT.REPAIR, OPT,
    )  # fmt: skip
    if OPT.NORMALIZE:
        if not OPT.REPAIR:
            if any_underflows(total, offs_m, bounds, sizes, OPT):
                acc, total, lift = walk_keys(
                    q, key, value, k_strides, v_strides, mask, blocks, b, h, h_kv, start_m, offs_m, bounds, z_bias,
                    slopes, shift, unit, by_row, seed, threshold, sizes, scales, True, OPT,
                )  # fmt: skip
        is_empty = total == 0.0
        acc = acc / tl.where(is_empty, 1.0, total)[:, None]
        unit = 1.0
        pointers = rows.sum_pointers(row_sums, b, h, q_start, offs_m, len_q, heads, OPT)
        tl.store(pointers, total, mask=offs_m < sizes.len_q)
        tl.store(pointers + 1, tl.where(is_empty, 0.0, lift), mask=offs_m < sizes.len_q)
    tile.store(out, o_strides, acc * (scales.out * unit), start_m, sizes.len_q, OPT.DV)
