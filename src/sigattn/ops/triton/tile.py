"""Functions shared by the kernels: which tile a program has, loads and stores, and P of a tile.

Functions of a tile take the indices of rows and columns with shapes [BLOCK_M, 1] and [1, BLOCK_N], or transposed, so
that the same code works on tiles of (queries, keys) and of (keys, queries). The start of a tile is added in 64 bits, so
tensors may have more than 2^31 entries; offsets inside a tile are 32-bit, which saves registers (kernel_args.py copies
tensors whose tiles would span more).
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from sigattn.ops.triton.activation import LN2, LOG2E, Z_TO_HALF, sigmoid, tanh
from sigattn.ops.triton.args import Mask, Sizes, Strides, padded_head_dim

# Triton's interpreter has no products of bfloat16 and truncates where the hardware rounds.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# A property of ``Options`` would do in Triton 3.7, but kernels of Triton 3.8 see its fields only.
tile_width = triton.constexpr_function(padded_head_dim)


# -- the tile of a program --------------------------------------------------------------------------------------------


@triton.jit
def sample_sizes(b, sequences, sizes, OPT: tl.constexpr):
    """Return the first rows of sample b in packed queries and keys (0 if not packed), and the sizes of the sample."""
    q_start = tl.zeros((), tl.int64)
    k_start = tl.zeros((), tl.int64)
    len_q, len_k, query_offset = sizes.len_q, sizes.len_k, sizes.query_offset
    if OPT.LENGTHS:
        len_k = tl.minimum(tl.load(sequences.key_lengths + b).to(tl.int32), len_k)
    if OPT.VARLEN:
        q_start = tl.load(sequences.cu_seqlens_q + b).to(tl.int64)
        k_start = tl.load(sequences.cu_seqlens_k + b).to(tl.int64)
        len_q = (tl.load(sequences.cu_seqlens_q + b + 1).to(tl.int64) - q_start).to(tl.int32)
        len_k = (tl.load(sequences.cu_seqlens_k + b + 1).to(tl.int64) - k_start).to(tl.int32)
        query_offset = len_k - len_q
        len_q, len_k = tl.minimum(len_q, sizes.len_q), tl.minimum(len_k, sizes.len_k)  # the sizes of a mask
    return q_start, k_start, Sizes(len_q, len_k, sizes.heads, query_offset, sizes.left, sizes.right)


@triton.jit
def query_tile(sequences, sizes, OPT: tl.constexpr):
    """Return the tile of queries of this program: (b, h, h_kv, start_m, q_start, k_start, sizes).

    These are sample, query head, key head, first query of the tile, and the results of ``sample_sizes``. With packed
    sequences start_m may lie outside the sequence: below 0 or beyond the last query.
    """
    tiles = tl.cdiv(sizes.len_q, OPT.BLOCK_M)
    head = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    b = (head // sizes.heads).to(tl.int64)
    h = head % sizes.heads
    q_start, k_start, sizes = sample_sizes(b, sequences, sizes, OPT)
    if OPT.HAS_RIGHT:  # under a causal mask the last queries have the most keys: they go first
        tile = tl.cdiv(sizes.len_q, OPT.BLOCK_M) - 1 - tile
    return b, h.to(tl.int64), (h // OPT.GROUP).to(tl.int64), tile * OPT.BLOCK_M, q_start, k_start, sizes


@triton.jit
def tile_bounds(first, last, length, left, right, BLOCK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Return which tiles of the other axis, 0 … length - 1, positions first … last - 1 see: bounds of three phases.

    Position i sees i - left … i + right. Returns (start, full_start, full_stop, stop): tiles of BLOCK from start to
    stop are visited; every position sees the whole of those from full_start to full_stop, so they need no mask.
    """
    start = 0
    stop = length
    full_start = 0
    full_stop = length // BLOCK * BLOCK
    if HAS_LEFT:
        start = tl.maximum(first - left, 0) // BLOCK * BLOCK
        full_start = (tl.maximum(last - 1 - left, 0) + BLOCK - 1) // BLOCK * BLOCK
    if HAS_RIGHT:
        stop = tl.minimum(length, tl.maximum(last + right, 0))
        full_stop = tl.minimum(length, tl.maximum(first + right + 1, 0)) // BLOCK * BLOCK
    any_full = full_start < full_stop
    full_stop = tl.where(any_full, full_stop, start)
    full_start = tl.where(any_full, full_start, start)
    return start, full_start, full_stop, stop


# -- loads and stores -------------------------------------------------------------------------------------------------


@triton.jit
def aligned(strides, OPT: tl.constexpr):
    """Return strides that are multiples of OPT.UNIT in a form from which the compiler sees that."""
    UNIT: tl.constexpr = OPT.UNIT
    return Strides(strides.b // UNIT * UNIT, strides.h // UNIT * UNIT, strides.n // UNIT * UNIT, strides.d)


@triton.jit
def load(
    source, strides, b, h, start, length, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHECKED: tl.constexpr,
    OPT: tl.constexpr, visible=None,
):  # fmt: skip
    """Load rows start … start + ROWS - 1 of a matrix (length, WIDTH), with zeros outside it: [ROWS, BLOCK_WIDTH].

    source: pointer to the matrix; with TMA, a descriptor of (B, H, length, WIDTH), and the matrix is that of b and h.
    visible: False for rows that are zeros, [ROWS], or None.
    """
    BLOCK_WIDTH: tl.constexpr = tile_width(WIDTH)
    if OPT.TMA:
        index = [tl.cast(b, tl.int32), tl.cast(h, tl.int32), tl.cast(start, tl.int32), 0]
        tile = source.load(index).reshape(ROWS, BLOCK_WIDTH)
    else:
        tile = load_rows(source, strides, start, length, ROWS, WIDTH, CHECKED, visible)
    return tile


@triton.jit
def load_rows(
    base, strides, start, length, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHECKED: tl.constexpr, visible=None
):  # fmt: skip
    """Load rows of a matrix as ``load``, by its address."""
    BLOCK_WIDTH: tl.constexpr = tile_width(WIDTH)
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_WIDTH)[None, :]
    pointers = base + tl.cast(start, tl.int64) * strides.n + rows * strides.n + columns * strides.d
    if visible is not None and WIDTH != BLOCK_WIDTH:
        tile = tl.load(pointers, mask=visible[:, None] & (columns < WIDTH), other=0.0)
    elif visible is not None:
        tile = tl.load(pointers, mask=visible[:, None], other=0.0)
    elif CHECKED and WIDTH != BLOCK_WIDTH:
        tile = tl.load(pointers, mask=in_bounds(start + rows, columns, length, WIDTH), other=0.0)
    elif CHECKED:
        tile = tl.load(pointers, mask=start + rows < length, other=0.0)
    elif WIDTH != BLOCK_WIDTH:
        tile = tl.load(pointers, mask=columns < WIDTH, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store(base, strides, tile, start, length, WIDTH: tl.constexpr):
    """Store rows start … of a tile, as far as they lie inside a matrix (length, WIDTH)."""
    rows = tl.arange(0, tile.shape[0])[:, None]
    columns = tl.arange(0, tile.shape[1])[None, :]
    pointers = base + tl.cast(start, tl.int64) * strides.n + rows * strides.n + columns * strides.d
    tl.store(pointers, cast(tile, base.dtype.element_ty), mask=in_bounds(start + rows, columns, length, WIDTH))


@triton.jit
def in_bounds(rows, columns, n, m):
    """Return True where a row is less than n and a column less than m."""
    return (rows < n) & (columns < m)


@triton.jit
def zero_accumulator(ROWS: tl.constexpr, WIDTH: tl.constexpr, WGMMA: tl.constexpr):
    """Return an accumulator of zeros for the products of a loop: [ROWS, WIDTH] in float32.

    On Hopper, ptxas makes every product of a kernel wait for the one before it (advisory C7515) if it writes the zeros
    again on the path that skips a loop. It cannot do that with the result of volatile assembly.
    """
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    if WGMMA and not _INTERPRETED:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1)
    return acc


@triton.jit
def dot(a, b, acc, OPT: tl.constexpr):
    """Return the product of a and b in float32, added to acc unless that is None."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=OPT.PRECISION)


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """Round float32 to another dtype."""
    if _INTERPRETED:
        if DTYPE == tl.bfloat16:  # to nearest, ties to even; the bits that the conversion truncates are then 0
            bits = x.to(tl.int32, bitcast=True)
            x = (bits + 0x7FFF + ((bits >> 16) & 1) & -65536).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


# -- bias, exponent of float16 weights, ALiBi, masks ------------------------------------------------------------------


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
    """Return the factor from the weights' power of two to that of dS, and the inverse of the latter.

    dS enters products in float16 too. Weights of 1/n want a large power; but where P is about 1/2, dS is dP/4, and
    with the weights' own 2^15 it would overflow from dP = 8 on. With 2^7 it does from 2000 on, and keeps all bits of
    gradients down to 2^-21.
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
def visible_keys(mask, keys, length):
    """Return True for the keys before length that a mask of keys lets queries see."""
    return tl.load(mask.pointer + keys.to(tl.int64) * mask.k, mask=keys < length, other=0) != 0


@triton.jit
def load_mask(mask, rows, columns, sizes, EDGE: tl.constexpr, OPT: tl.constexpr):
    """Return the mask's entries of a tile, or of its keys if all queries have the same.

    Tiles that do not exist are loaded as zeros. EDGE: the tile may extend beyond the last query and key; else only
    along the axis that is not walked. There its entries have no effect.
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
            entries = tl.load(pointers, mask=in_bounds(i, j, sizes.len_q, sizes.len_k), other=hidden)
        elif KEYS_FIRST:
            entries = tl.load(pointers, mask=j < sizes.len_k, other=0)
        else:
            entries = tl.load(pointers, mask=i < sizes.len_q, other=0)
        if TRANSPOSED:
            entries = tl.trans(entries)
    return entries


@triton.jit
def block_state(blocks, b, h, start_m, start_n, OPT: tl.constexpr):
    """Return the entry of the table of mask blocks for a tile, which lies within one block (ops/block_mask.py)."""
    at = (start_m // OPT.BLOCK_Q).to(tl.int64) * blocks.q + start_n // OPT.BLOCK_K
    return tl.load(blocks.table + b * blocks.b + h * blocks.h + at)


@triton.jit
def load_block_mask(blocks, state, rows, columns, OPT: tl.constexpr):
    """Return True where the mask of a block lets queries see keys; all of them are of that block."""
    tile = blocks.tiles + state.to(tl.int64) * (OPT.BLOCK_Q * OPT.BLOCK_K)
    return tl.load(tile + (rows % OPT.BLOCK_Q) * OPT.BLOCK_K + columns % OPT.BLOCK_K) != 0


@triton.jit
def apply_window_mask(p, i, j, sizes, OPT: tl.constexpr, outside: tl.constexpr = 0.0):
    """Return p with another number where key position j lies outside the window of query position i."""
    if OPT.HAS_LEFT:
        p = tl.where(j >= i - sizes.left, p, outside)
    if OPT.HAS_RIGHT:
        p = tl.where(j <= i + sizes.right, p, outside)
    return p


# -- P ----------------------------------------------------------------------------------------------------------------


@triton.jit
def apply_softcap(logits, scales, OPT: tl.constexpr):
    """Return tanh(cap · Q Kᵀ) for calls with a soft cap, else Q Kᵀ itself."""
    if OPT.SOFTCAP:
        logits = tanh(logits * scales.cap)
    return logits


@triton.jit
def weights(
    logits, z_scale, z_bias, slopes, shift, unit, rows, columns, sizes, mask, block_mask,
    EDGE: tl.constexpr, OPT: tl.constexpr, ONLY_Z: tl.constexpr = False,
):  # fmt: skip
    """Return P of a tile, before dropout; with ONLY_Z instead z, +inf where P is 0 because a key is hidden.

    logits: Q Kᵀ, with the soft cap applied. z_scale, z_bias: its factor and the bias as terms of z (activation.py).
    slopes: of ALiBi, before and after. rows, columns: indices of queries and keys. mask: attn_mask of the head, or
    None. block_mask: True where a ``BlockMask`` lets queries see keys, or None. EDGE: the window may cross the tile.
    """
    # Where keys come first, rows that do not exist are summed: a product of theirs with an inf or NaN is NaN, so they
    # must see no key that real queries do not see. With "paired" two neighbours share a reciprocal: a masked NaN must
    # not meet its neighbour.
    KEYS_FIRST: tl.constexpr = columns.shape[0] != 1
    KIND: tl.constexpr = OPT.SIGMOID
    PAIRED: tl.constexpr = KIND == "paired" or KIND == "paired-rcp"
    PER_NAT: tl.constexpr = 0.5 if KIND == "fast" else -LOG2E  # of what ``sigmoid`` takes: S / 2, or z
    if KIND == "fast":
        z_scale, z_bias = z_scale * Z_TO_HALF, z_bias * Z_TO_HALF
    if OPT.MASK == "keys" and not OPT.TMA:  # hidden keys and values are zeros
        mask = None
    if block_mask is not None and PAIRED:
        logits = tl.where(block_mask, logits, 0.0)
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
            z += entries * PER_NAT
        else:
            seen = entries != 0
    if PAIRED:
        if mask is not None:
            z = tl.where(seen, z, 0.0)
        if EDGE:
            z = apply_window_mask(z, i, columns, sizes, OPT)
    none: tl.constexpr = float("inf") if ONLY_Z else 0.0
    p = z if ONLY_Z else sigmoid(z, unit, shift, KIND, OPT.SHIFT != "none")
    if mask is not None:
        p = tl.where(seen, p, none)
        if not _INTERPRETED:  # LLVM would select after rounding to 16 bits, which takes 1 instruction more
            p = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [p], dtype=tl.float32, is_pure=True, pack=1)
    if EDGE:
        p = apply_window_mask(p, i, columns, sizes, OPT, none)
        if OPT.NORMALIZE and not KEYS_FIRST:  # else it is enough that the values of keys beyond the last are 0
            p = tl.where(columns < sizes.len_k, p, none)
    if block_mask is not None:
        p = tl.where(block_mask, p, none)
    return p


# -- rows that are divided by their sum: W = P / t, with t the sum of the row ------------------------------------------


@triton.jit
def add_to_row_sums(sums, p):
    """Add the weights of a tile to partial sums of its rows, [BLOCK_M, 4].

    In the layout of a product's result, columns 8i + 2k and 8i + 2k + 1 are in the k-th of four threads: each of them
    has a partial sum, and no number changes its thread.
    """
    fours = tl.reshape(p, (p.shape[0], p.shape[1] // 8, 4, 2))
    return sums + tl.sum(tl.sum(fours, 3), 1)


@triton.jit
def lifted_weights(z, row_shift, least_shift, OPT: tl.constexpr):
    """Return P · 2^s of a tile, s of each row, and the factor of what earlier tiles summed with the exponent row_shift.

    s is about the least z of the row so far, but at least ``least_shift``, so that no row underflows: s · ln 2, the
    lift, is an integer, which float32 has exactly. z: as ``weights`` returns it, +inf where a key is hidden. row_shift:
    [BLOCK_M], large before the first tile.
    """
    least = tl.floor(tl.min(z, 1) * LN2) * LOG2E
    new_shift = tl.maximum(tl.minimum(row_shift, least), least_shift)
    KIND: tl.constexpr = "exact" if OPT.SIGMOID == "exact" else "accurate"
    p = sigmoid(z, tl.exp2(-new_shift)[:, None], new_shift[:, None], KIND, True)
    return tl.where(z == float("inf"), 0.0, p), new_shift, tl.exp2(new_shift - row_shift)


@triton.jit
def row_sum_pointers(row_sums, b, h, q_start, rows, len_q, heads, OPT: tl.constexpr):
    """Return the addresses of the sum and the lift of each row: (B, Hq, N, 2) or packed (T, Hq, 2)."""
    row = (q_start + rows).to(tl.int64) * heads + h if OPT.VARLEN else (b * heads + h) * len_q + rows
    return row_sums + 2 * row


@triton.jit
def row_term_pointers(row_terms, b, h, q_start, rows, pitch, heads, OPT: tl.constexpr):
    """Return the addresses of the first of four numbers of each row: (B, Hq, N, 4) or packed (Hq, T, 4)."""
    head = h if OPT.VARLEN else b * heads + h
    return row_terms + 4 * (head * pitch + q_start + rows)


@triton.jit
def load_row_terms(pointers, start, length, ROWS: tl.constexpr, CHECKED: tl.constexpr):
    """Return bias, factor of the weights and dO · O of rows start … start + ROWS - 1, each [1, ROWS]; 0 for no row.

    The four numbers of a row, of which the last is not used, are loaded together. Of fewer numbers than threads, Triton
    would have each thread load what its own weights need, which takes up to five instructions for each weight.
    """
    rows = tl.arange(0, ROWS)[:, None, None]
    numbers = 2 * tl.arange(0, 2)[None, :, None] + tl.arange(0, 2)[None, None, :]
    if CHECKED:
        terms = tl.load(pointers + 4 * rows + numbers, mask=start + rows < length, other=0.0)
    else:
        terms = tl.load(pointers + 4 * rows + numbers)
    first, second = tl.split(terms)  # numbers 0 and 2, 1 and 3
    z_bias, delta = tl.split(first)
    gain, _ = tl.split(second)
    return z_bias[None, :], gain[None, :], delta[None, :]


@triton.jit
def divide_by_sums(row_sums, z_bias, rows, sizes):
    """Return the bias and the factor with which W = gain · P is the weight of a row, both [BLOCK_M].

    Where the whole row is so small that P = 2^-z up to rounding, W does not depend on a constant in z. One is
    subtracted there that makes the sum 2^-24; of other rows it is 0.

    row_sums: addresses of the sum and the lift (``normalization``). z_bias: the bias as a term of z.
    """
    total = tl.load(row_sums, mask=rows < sizes.len_q, other=0.0)
    lift = tl.load(row_sums + 1, mask=rows < sizes.len_q, other=0.0)
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    shift = lift * LOG2E
    drop = tl.maximum(shift - tl.log2(total) - 24.0, 0.0)
    gain = tl.where(is_empty, 0.0, tl.exp2(shift - drop) / total)
    return z_bias - drop, gain


# -- dropout: the same numbers as ops/dropout.py ----------------------------------------------------------------------


@triton.jit
def _mix(x):
    """Return the low 32 bits of the finaliser of splitmix64, of int64."""
    x = x.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def row_hash(seed, head, i):
    """Return the part of the hash that depends on head (b · Hq + h) and query."""
    by_head = _mix(head + tl.cast(seed, tl.int64) + tl.zeros_like(i).to(tl.int64))
    return _mix(by_head.to(tl.int64) + i)


@triton.jit
def column_hash(seed, j):
    """Return the part of the hash that depends on the key."""
    start = _mix((tl.cast(seed, tl.int64) ^ -7046029254386353131) + tl.zeros_like(j).to(tl.int64))
    return _mix(start.to(tl.int64) + j)


@triton.jit
def dropout_keep(by_row, by_column, threshold):
    """Return True where dropout keeps a weight."""
    x = (by_row ^ by_column).to(tl.int32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= -2073254261
    return x >= threshold
