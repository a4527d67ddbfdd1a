"""Weights P of a tile: bias, exponent of float16 weights, ALiBi, masks, σ, dropout.

Rows and columns are indices [BLOCK_M, 1] and [1, BLOCK_N], or transposed: tiles are (queries, keys) or (keys, queries).
"""

import triton
import triton.language as tl

from sigattn.ops.triton.activation import INTERPRETED, LOG2E, Z_TO_HALF, absolute_tanh, runs_ptx, sigmoid, tanh
from sigattn.ops.triton.args import Mask


@triton.jit
def load_bias(bias, offset, rows, sizes, OPT: tl.constexpr):
    """Return the bias as a term of z, -log₂e · b: a number, or [BLOCK_M] for a tensor that begins at offset."""
    if OPT.BIAS == "tensor":
        pointers = bias.pointer + offset + rows.to(tl.int64) * bias.row_stride
        term = tl.load(pointers, mask=rows < sizes.len_q, other=0.0).to(tl.float32) * -LOG2E
    elif OPT.BIAS == "scalar":
        term = tl.load(bias.pointer).to(tl.float32) * -LOG2E
    elif OPT.BIAS == "length":
        term = tl.log2(tl.maximum(sizes.len_k, 1).to(tl.float32))
        if OPT.NORMALIZE:
            term += bias.value
    else:
        tl.static_assert(OPT.BIAS == "number")
        term = bias.value
    return term


@triton.jit
def load_shift(bias, m, OPT: tl.constexpr):
    """Return the exponent of the power of two that multiplies float16 weights, and its inverse 2^-shift."""
    shift, unit = 0.0, 1.0
    if OPT.SHIFT != "none":
        if OPT.SHIFT == "number":
            shift = bias.shift
        elif OPT.SHIFT == "tensor":
            shift = tl.load(bias.shift_pointer).to(tl.float32)
        elif OPT.SHIFT == "scalar":
            shift = tl.floor(tl.load(bias.shift_pointer).to(tl.float32) * -LOG2E)
            shift = tl.where(shift == shift, tl.minimum(tl.maximum(shift, 0.0), 15.0), 0.0)  # 0 for NaN
        else:
            tl.static_assert(OPT.SHIFT == "length")
            shift = tl.minimum(tl.floor(tl.log2(tl.maximum(m, 1).to(tl.float32))), 15.0)
        unit = tl.exp2(-shift)
    return shift, unit


@triton.jit
def gradient_shift(shift, OPT: tl.constexpr):
    """Return the factor from the weights' power of two to that of dS in float16, and the inverse of the latter.

    Where P is about 1/2, dS is dP/4, and with the weights' own 2^15 it would overflow from dP = 8 on. With 2^7 it does
    from 2000 on, and keeps all bits of gradients down to 2^-21.
    """
    lower, unit = 1.0, 1.0
    if OPT.SHIFT != "none":
        exponent = tl.minimum(shift, 7.0)
        lower, unit = tl.exp2(exponent - shift), tl.exp2(-exponent)
    return lower, unit


@triton.jit
def load_slopes(alibi, b, h, OPT: tl.constexpr):
    """Return ALiBi's slopes of a head, for keys before and after the query."""
    before, after = 0.0, 0.0
    if OPT.SLOPES:
        pointer = alibi.pointer + b * alibi.b + h * alibi.h
        before, after = tl.load(pointer).to(tl.float32), tl.load(pointer + alibi.s).to(tl.float32)
    return before, after


@triton.jit
def mask_of_head(mask, b, h):
    """Return the mask that begins at a head."""
    return Mask(mask.pointer + b * mask.b + h * mask.h, mask.b, mask.h, mask.q, mask.k)


@triton.jit
def load_mask(mask, rows, columns, sizes, EDGE: tl.constexpr, OPT: tl.constexpr):
    """Return the mask's entries of a tile, or of its keys if all queries have the same.

    EDGE: the tile may extend beyond the last query and key; else only along the axis that is not walked, where its
    entries have no effect.
    """
    KEYS_FIRST: tl.constexpr = columns.shape[0] != 1
    hidden: tl.constexpr = float("-inf") if KEYS_FIRST and OPT.MASK == "added" else 0
    if OPT.MASK_ORDER == "keys":
        pointers = mask.pointer + columns.to(tl.int64) * mask.k
        entries = tl.load(pointers, mask=columns < sizes.len_k, other=0)
    else:
        # In the order of memory: single entries take more time than a transposition in shared memory.
        TRANSPOSED: tl.constexpr = KEYS_FIRST != (OPT.MASK_ORDER == "keys, queries")
        if TRANSPOSED:
            i, j = tl.trans(rows), tl.trans(columns)
        else:
            i, j = rows, columns
        pointers = mask.pointer + i.to(tl.int64) * mask.q + j.to(tl.int64) * mask.k
        if EDGE:
            entries = tl.load(pointers, mask=(i < sizes.len_q) & (j < sizes.len_k), other=hidden)
        elif KEYS_FIRST:
            entries = tl.load(pointers, mask=j < sizes.len_k, other=0)
        else:
            entries = tl.load(pointers, mask=i < sizes.len_q, other=0)
        if TRANSPOSED:
            entries = tl.trans(entries)
    return entries


@triton.jit
def at_least_lowest(entries):
    """Return a mask's entries with a lower bound whose term of z is finite: float32's smallest number has none."""
    return tl.maximum(entries, -2.3e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_state(blocks, b, h, start_m, start_n, OPT: tl.constexpr):
    """Return the entry of the table of mask blocks for a tile, which lies within one block; 1 without blocks."""
    state = 1
    if OPT.BLOCK_Q:
        at = (start_m // OPT.BLOCK_Q).to(tl.int64) * blocks.q + start_n // OPT.BLOCK_K
        state = tl.load(blocks.table + b * blocks.b + h * blocks.h + at)
    return state


@triton.jit
def apply_window_mask(p, i, j, sizes, OPT: tl.constexpr, outside: tl.constexpr = 0.0):
    """Return p with another number where key position j lies outside the window of query position i."""
    if OPT.HAS_LEFT:
        p = tl.where(j >= i - sizes.left, p, outside)
    if OPT.HAS_RIGHT:
        p = tl.where(j <= i + sizes.right, p, outside)
    return p


@triton.jit
def select(condition, p, other):
    """Return p where the condition holds."""
    # Without the assembly LLVM would select after rounding to 16 bits, which takes 1 instruction more.
    p = tl.where(condition, p, other)
    if runs_ptx():
        p = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [p], dtype=tl.float32, is_pure=True, pack=1)
    return p


@triton.jit
def apply_softcap(logits, scales, OPT: tl.constexpr):
    """Return tanh(cap · Q Kᵀ) for calls with a soft cap, else Q Kᵀ itself."""
    if OPT.SOFTCAP == "relative":
        logits = tanh(logits * scales.cap)
    elif OPT.SOFTCAP == "absolute":
        logits = absolute_tanh(logits * scales.cap)
    return logits


@triton.jit
def weights(
    logits, z_scale, z_bias, slopes, shift, unit, rows, columns, sizes, mask, blocks, state,
    EDGE: tl.constexpr, OPT: tl.constexpr, ONLY_Z: tl.constexpr = False,
):  # fmt: skip
    """Return P of a tile, before dropout; with ONLY_Z instead z, +inf where P is 0 because a key is hidden.

    logits: Q Kᵀ, with the soft cap applied. z_scale, z_bias: its factor and the bias as terms of z (activation.py).
    EDGE: the window may cross the tile.
    """
    # Where keys come first, rows that do not exist are summed: a product of theirs with an inf or NaN is NaN, so they
    # must see no key that real queries do not see. With "paired" two neighbours share a reciprocal: a masked NaN must
    # not meet its neighbour.
    KEYS_FIRST: tl.constexpr = columns.shape[0] != 1
    KIND: tl.constexpr = OPT.SIGMOID
    PAIRED: tl.constexpr = KIND == "paired" or KIND == "paired-rcp"
    PER_NAT: tl.constexpr = 0.5 if KIND == "fast" else -LOG2E  # of what ``sigmoid`` takes: S / 2, or z
    none: tl.constexpr = float("inf") if ONLY_Z else 0.0
    if OPT.BLOCK_Q:
        block = blocks.tiles + state.to(tl.int64) * (OPT.BLOCK_Q * OPT.BLOCK_K)
        in_block = tl.load(block + (rows % OPT.BLOCK_Q) * OPT.BLOCK_K + columns % OPT.BLOCK_K) != 0
        if PAIRED:
            logits = tl.where(in_block, logits, 0.0)
    if KIND == "fast":
        z_scale, z_bias = z_scale * Z_TO_HALF, z_bias * Z_TO_HALF
    if OPT.MASK == "keys" and not OPT.TMA:  # hidden keys and values are zeros
        mask = None
    i = sizes.query_offset + rows
    z = logits * z_scale + z_bias
    if OPT.SLOPES:
        distance = (i - columns).to(tl.float32)
        z += tl.where(distance > 0, -slopes[0] * distance, slopes[1] * distance) * PER_NAT
    if EDGE and KEYS_FIRST:
        i = tl.where(rows < sizes.len_q, i, -(1 << 30) if OPT.HAS_RIGHT else 1 << 30)
    if mask is not None:
        entries = load_mask(mask, rows, columns, sizes, EDGE, OPT)
        if OPT.MASK == "added":
            entries = entries.to(tl.float32)
            seen = entries != float("-inf")
            z += (at_least_lowest(entries) if ONLY_Z else entries) * PER_NAT
        else:
            seen = entries != 0
    if PAIRED:
        if mask is not None:
            z = tl.where(seen, z, 0.0)
        if EDGE:
            z = apply_window_mask(z, i, columns, sizes, OPT)
    p = z if ONLY_Z else sigmoid(z, unit, shift, KIND, OPT.SHIFT != "none")
    if mask is not None:
        p = select(seen, p, none)
    if EDGE:
        p = apply_window_mask(p, i, columns, sizes, OPT, none)
        if OPT.NORMALIZE and not KEYS_FIRST:  # else it is enough that the values of keys beyond the last are 0
            p = tl.where(columns < sizes.len_k, p, none)
    if OPT.BLOCK_Q:
        p = tl.where(in_block, p, none)
    return p


# -- dropout: the same numbers as ``ops/dropout.py`` ------------------------------------------------------------------


@triton.jit
def _mix(x):
    """Return the low 32 bits of the finaliser of splitmix64, of int64."""
    x = x.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def computed_once(x, OPT: tl.constexpr):
    """Return int32 numbers, one a row or column of a tile, so that each is computed in one thread on Hopper."""
    # A gather reads the numbers of other threads from shared memory. Without it the compiler has each thread compute
    # those of all its weights, 16 of 64 columns, which takes 11 instructions a score. On Ampere and Ada, whose operands
    # lie in registers, bwd_dkdv_kernel would spill.
    if OPT.WGMMA or INTERPRETED:
        x = tl.gather(x, tl.arange(0, x.shape[0]), 0)
    return x


@triton.jit
def row_hash(seed, head, i, OPT: tl.constexpr):
    """Return the part of the hash that depends on head (b · Hq + h) and query."""
    by_head = _mix(head + tl.cast(seed, tl.int64) + tl.zeros_like(i).to(tl.int64))
    return computed_once(_mix(by_head.to(tl.int64) + i), OPT)


@triton.jit
def column_hash(seed, j, OPT: tl.constexpr):
    """Return the part of the hash that depends on the key."""
    start = _mix((tl.cast(seed, tl.int64) ^ -7046029254386353131) + tl.zeros_like(j).to(tl.int64))
    return computed_once(_mix(start.to(tl.int64) + j), OPT)


@triton.jit
def dropout_keep(by_row, by_column, threshold):
    """Return True where dropout keeps a weight."""
    x = (by_row ^ by_column).to(tl.int32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= -2073254261
    return x >= threshold
