"""Which tile a program has, and loads, stores and products of tiles.

The start of a tile is added in 64 bits, so tensors may have more than 2^31 entries; offsets inside a tile are 32-bit,
which saves registers.
"""

import triton
import triton.language as tl

from sigattn.ops.triton.activation import INTERPRETED
from sigattn.ops.triton.args import Sizes, Strides, padded_head_dim

# A property of ``Options`` would do in Triton 3.7, but kernels of Triton 3.8 see its fields only.
tile_width = triton.constexpr_function(padded_head_dim)


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
    """Return sample, query head, key head and first query of this program's tile, and ``sample_sizes``.

    With packed sequences the first query may lie outside the sequence: below 0 or beyond the last query.
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
    """Return (start, full_start, full_stop, stop): which tiles of 0 … length - 1 positions first … last - 1 see.

    Position i sees i - left … i + right. Every position sees the whole of the tiles from full_start to full_stop.
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


@triton.jit
def aligned(strides, OPT: tl.constexpr):
    """Return strides that are multiples of OPT.UNIT in a form from which the compiler sees that."""
    UNIT: tl.constexpr = OPT.UNIT
    return Strides(strides.b // UNIT * UNIT, strides.h // UNIT * UNIT, strides.n // UNIT * UNIT, strides.d)


@triton.jit
def of_head(pointer, strides, b, h, start):
    """Return the address of row ``start`` of a head."""
    return pointer + (b * strides.b + h * strides.h + start * strides.n)


@triton.jit
def load(
    source, strides, b, h, start, length, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHECKED: tl.constexpr,
    OPT: tl.constexpr, visible=None,
):  # fmt: skip
    """Load rows start … start + ROWS - 1 of a matrix (length, WIDTH), with zeros outside it and where not ``visible``.

    source: pointer to the matrix; with TMA, a descriptor of (B, H, length, WIDTH), and the matrix is that of b and h.
    """
    if OPT.TMA:
        index = [tl.cast(b, tl.int32), tl.cast(h, tl.int32), tl.cast(start, tl.int32), 0]
        tile = source.load(index).reshape(ROWS, tile_width(WIDTH))
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
    inside = None
    if visible is not None:
        inside = visible[:, None]
    elif CHECKED:
        inside = start + rows < length
    if WIDTH != BLOCK_WIDTH:
        inside = columns < WIDTH if inside is None else inside & (columns < WIDTH)
    if inside is None:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def visible_keys(mask, keys, length):
    """Return True for the keys before length that a mask of keys lets queries see."""
    return tl.load(mask.pointer + keys.to(tl.int64) * mask.k, mask=keys < length, other=0) != 0


@triton.jit
def load_keys(
    key, value, k_strides, v_strides, mask, b, h_kv, start_n, offs_n, length, CHECKED: tl.constexpr, OPT: tl.constexpr
):  # fmt: skip
    """Load a tile of keys and one of values, [BLOCK_N, D] and [BLOCK_N, DV]; zeros if a mask of keys hides them."""
    visible = None
    if OPT.MASK == "keys" and not OPT.TMA:
        visible = visible_keys(mask, offs_n, length)
    k = load(key, k_strides, b, h_kv, start_n, length, OPT.BLOCK_N, OPT.D, CHECKED, OPT, visible)
    v = load(value, v_strides, b, h_kv, start_n, length, OPT.BLOCK_N, OPT.DV, CHECKED, OPT, visible)
    return k, v


@triton.jit
def store(base, strides, tile, start, length, WIDTH: tl.constexpr):
    """Store rows start … of a tile, as far as they lie inside a matrix (length, WIDTH)."""
    rows = tl.arange(0, tile.shape[0])[:, None]
    columns = tl.arange(0, tile.shape[1])[None, :]
    pointers = base + tl.cast(start, tl.int64) * strides.n + rows * strides.n + columns * strides.d
    tl.store(pointers, cast(tile, base.dtype.element_ty), mask=(start + rows < length) & (columns < WIDTH))


@triton.jit
def zero_accumulator(ROWS: tl.constexpr, WIDTH: tl.constexpr, WGMMA: tl.constexpr):
    """Return an accumulator of zeros for the products of a loop: [ROWS, WIDTH] in float32."""
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    # On Hopper, ptxas makes every product of a kernel wait for the one before it (advisory C7515) if it writes the
    # zeros again on the path that skips a loop. It cannot do that with the result of volatile assembly.
    if WGMMA and not INTERPRETED:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1)
    return acc


@triton.jit
def dot(a, b, acc, OPT: tl.constexpr):
    """Return the product of a and b in float32, added to acc unless that is None."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=OPT.PRECISION)


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """Round float32 to another dtype."""
    if INTERPRETED:
        if DTYPE == tl.bfloat16:  # to nearest, ties to even; the bits that the conversion truncates are then 0
            bits = x.to(tl.int32, bitcast=True)
            x = (bits + 0x7FFF + ((bits >> 16) & 1) & -65536).to(tl.float32, bitcast=True)
    return x.to(DTYPE)
