"""What the kernels share: which tiles there are, how they are loaded, and what position and masks do to a tile.

Functions of a tile take the rows' and columns' indices ready for broadcasting, so that one text serves tiles of
(queries, keys) and of (keys, queries). A tile's own start is added in 64 bits, so tensors may have more than 2^31
elements; offsets inside a tile of operands are 32-bit, for 64 would cost registers (kernel_args.py sees to it that they
fit).
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from sigattn.ops.triton.activation import sigmoid


@triton.jit
def tile_bounds(first, last, length, left, right, BLOCK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """How a run of places first … last - 1 meets the other axis, 0 … length - 1, under the window.

    Place i sees i - left … i + right. Returns (start, full_start, full_stop, stop): tiles of BLOCK from start to stop
    are visited; those from full_start to full_stop are seen whole by every place, so they need no mask; the others are
    the edges.
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
    some = full_start < full_stop
    full_stop = tl.where(some, full_stop, start)
    full_start = tl.where(some, full_start, start)
    return start, full_start, full_stop, stop


@triton.jit
def assume_aligned(batch, head, row, UNIT: tl.constexpr):
    """Return three strides that are multiples of UNIT in a form that tells the compiler so."""
    return batch // UNIT * UNIT, head // UNIT * UNIT, row // UNIT * UNIT


@triton.jit
def load(
    source, b, h, start, length, stride_row, stride_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, CHECKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows start … start + ROWS - 1 of a matrix (length, WIDTH), 0 beyond it: (ROWS, BLOCK_WIDTH).

    source: where the matrix begins; with TMA, a descriptor of (B, H, length, WIDTH), and the matrix is that of b and h.
    """
    if TMA:
        place = [tl.cast(b, tl.int32), tl.cast(h, tl.int32), tl.cast(start, tl.int32), 0]
        tile = source.load(place).reshape(ROWS, BLOCK_WIDTH)
    else:
        rows = tl.arange(0, ROWS)[:, None]
        columns = tl.arange(0, BLOCK_WIDTH)[None, :]
        at = source + tl.cast(start, tl.int64) * stride_row + rows * stride_row + columns * stride_column
        if CHECKED and WIDTH != BLOCK_WIDTH:
            tile = tl.load(at, mask=(start + rows < length) & (columns < WIDTH), other=0.0)
        elif CHECKED:
            tile = tl.load(at, mask=start + rows < length, other=0.0)
        elif WIDTH != BLOCK_WIDTH:
            tile = tl.load(at, mask=columns < WIDTH, other=0.0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def store(
    base,
    tile,
    start,
    length,
    stride_row,
    stride_column,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """The counterpart of ``load``: writes what lies inside the matrix."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_WIDTH)[None, :]
    at = base + tl.cast(start, tl.int64) * stride_row + rows * stride_row + columns * stride_column
    tl.store(at, cast(tile, base.dtype.element_ty), mask=(start + rows < length) & (columns < WIDTH))


# Triton's interpreter knows no products of bfloat16, and cuts off bits where the hardware rounds.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr, WGMMA: tl.constexpr):
    """Return an accumulator of zeros, (ROWS, WIDTH) in float32, for the products of a loop.

    WGMMA: True on Hopper. There ptxas makes every product of a kernel wait for the one before it (advisory C7515) where
    it writes the zeros again on the path that skips a loop. It cannot do that with the result of volatile assembly.
    """
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    if WGMMA and not _INTERPRETED:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1)
    return acc


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """The product of a and b, added to acc unless that is None, in float32."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """float32 rounded to another dtype."""
    if _INTERPRETED:
        if DTYPE == tl.bfloat16:  # to nearest, ties to even; what is left to cut off is 0
            bits = x.to(tl.int32, bitcast=True)
            x = (bits + 0x7FFF + ((bits >> 16) & 1) & -65536).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def load_bias(
    bias,
    bias_value,
    rows,
    n,
    keys,
    stride_row,
    BIAS: tl.constexpr,
):
    """Return the bias as a term of z, -log₂e · b: a number, or (rows,).

    BIAS: "number", "scalar" (a tensor's only entry), "tensor" (its entry of each row), or "length" (-log of the number
    of keys).
    """
    if BIAS == "tensor":
        at = bias + rows.to(tl.int64) * stride_row
        term = tl.load(at, mask=rows < n, other=0.0).to(tl.float32) * -1.4426950408889634
    elif BIAS == "scalar":
        term = tl.load(bias).to(tl.float32) * -1.4426950408889634
    elif BIAS == "length":
        term = tl.log2(tl.maximum(keys, 1).to(tl.float32))
    else:
        tl.static_assert(BIAS == "number")
        term = bias_value
    return term


@triton.jit
def load_shift(shift_pointer, shift_value, keys, SHIFT: tl.constexpr):
    """Return the exponent that float16 weights are multiplied by, and its inverse 2^-shift (activation.py)."""
    shift, unit = 0.0, 1.0
    if SHIFT != "none":
        if SHIFT == "number":
            shift = shift_value
        elif SHIFT == "tensor":
            shift = tl.load(shift_pointer).to(tl.float32)
        elif SHIFT == "scalar":
            shift = tl.floor(tl.load(shift_pointer).to(tl.float32) * -1.4426950408889634)
            shift = tl.where(shift == shift, tl.minimum(tl.maximum(shift, 0.0), 15.0), 0.0)  # 0 for NaN
        else:
            tl.static_assert(SHIFT == "length")
            shift = tl.minimum(tl.floor(tl.log2(tl.maximum(keys, 1).to(tl.float32))), 15.0)
        unit = tl.exp2(-shift)
    return shift, unit


@triton.jit
def gradient_shift(shift, SHIFT: tl.constexpr):
    """What takes dS from the weights' power of two to its own, and the inverse of that.

    dS goes into products in float16 too. Weights of 1/n want a large power; but where P is about 1/2, dS is dP/4, and
    with the weights' own 2^15 it would overflow from dP = 8 on. With 2^7 it does from 2000 on, and keeps all bits of
    gradients down to 2^-21.
    """
    lower, unit = 1.0, 1.0
    if SHIFT != "none":
        own = tl.minimum(shift, 7.0)
        lower, unit = tl.exp2(own - shift), tl.exp2(-own)
    return lower, unit


@triton.jit
def add_alibi(z, i, j, before, after, SLOPES: tl.constexpr):
    """ALiBi: slope · |i - j| taken from the logits, one slope for keys before the query and one for keys after it."""
    if SLOPES:
        distance = (i - j).to(tl.float32)
        z += tl.where(distance > 0, before * distance, -after * distance) * 1.4426950408889634
    return z


@triton.jit
def load_mask(mask, r, c, n, keys, stride_row, stride_column, other: tl.constexpr):
    """Load a tile of attn_mask, for queries r and keys c; other: what stands for those that do not exist."""
    at = mask + r.to(tl.int64) * stride_row + c.to(tl.int64) * stride_column
    return tl.load(at, mask=(r < n) & (c < keys), other=other)


@triton.jit
def apply_window_mask(p, i, j, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Zero what lies outside the window."""
    if HAS_LEFT:
        p = tl.where(j >= i - left, p, 0.0)
    if HAS_RIGHT:
        p = tl.where(j <= i + right, p, 0.0)
    return p


@triton.jit
def weights(
    products, z_scale, z_bias, r, c, n, keys, query_offset, left, right, before, after, mask, mask_n, mask_m, unit,
    shift, EDGE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SLOPES: tl.constexpr,
    MASK: tl.constexpr, SIGMOID: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """P of a tile before dropout, from Q Kᵀ, for queries r and keys c; EDGE: whether the window may cross the tile."""
    z = add_alibi(products * z_scale + z_bias, query_offset + r, c, before, after, SLOPES)
    i = query_offset + r
    # Where keys come first, rows that do not exist are summed: a product of theirs with an inf or NaN is NaN, so they
    # must see no key that real queries do not see. Where they come last, two share a reciprocal ("paired"): a masked
    # NaN must not meet its neighbour.
    KEYS_FIRST: tl.constexpr = c.shape[0] != 1
    if EDGE and KEYS_FIRST:
        i = tl.where(r < n, i, -(1 << 30) if HAS_RIGHT else 1 << 30)
    if MASK != "none":
        m = load_mask(mask, r, c, n, keys, mask_n, mask_m, float("-inf") if KEYS_FIRST and MASK == "added" else 0)
        if MASK == "added":
            m = m.to(tl.float32)
            seen = m != float("-inf")
            z -= m * 1.4426950408889634  # log₂e
        else:
            seen = m != 0
    if SIGMOID == "paired" and not KEYS_FIRST:
        if MASK != "none":
            z = tl.where(seen, z, 0.0)
        if EDGE:
            z = apply_window_mask(z, i, c, left, right, HAS_LEFT, HAS_RIGHT)
    p = sigmoid(z, unit, shift, SIGMOID, SHIFT != "none")
    if MASK != "none":
        p = tl.where(seen, p, 0.0)
    if EDGE:
        p = apply_window_mask(p, i, c, left, right, HAS_LEFT, HAS_RIGHT)
    return p


@triton.jit
def block_state(block_table, row_start, column_start, stride_row, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the entry of a table of mask blocks for a tile that lies within one block (ops/block_mask.py)."""
    at = (row_start // BLOCK_Q).to(tl.int64) * stride_row + column_start // BLOCK_K
    return tl.load(block_table + at)


@triton.jit
def load_block_mask(block_tiles, state, r, c, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return True where the mask of a block lets queries r see keys c, all of that block."""
    own = block_tiles + state.to(tl.int64) * (BLOCK_Q * BLOCK_K)
    return tl.load(own + (r % BLOCK_Q) * BLOCK_K + c % BLOCK_K) != 0


# -- dropout: ops/dropout.py, number for number -----------------------------------------------------------------------


@triton.jit
def _mix(x):
    """splitmix64's finaliser: int64 → its low 32 bits."""
    x = x.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def row_hash(seed, head, i):
    """The part of the hash that depends on head (b·Hq + h) and query."""
    by_head = _mix(head + tl.cast(seed, tl.int64) + tl.zeros_like(i).to(tl.int64))
    return _mix(by_head.to(tl.int64) + i)


@triton.jit
def column_hash(seed, j):
    """The part of the hash that depends on the key."""
    start = _mix((tl.cast(seed, tl.int64) ^ -7046029254386353131) + tl.zeros_like(j).to(tl.int64))
    return _mix(start.to(tl.int64) + j)


@triton.jit
def dropout_keep(by_row, by_column, threshold):
    """Whether dropout keeps each weight."""
    x = (by_row ^ by_column).to(tl.int32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= -2073254261
    return x >= threshold
