"""Parts of all attention kernels for Hopper, in Gluon, the lower level of Triton: TMA, wgmma, mbarriers, warp groups.

One warp loads tiles by TMA into rings of slots in shared memory, and groups of four warps compute. A program works on
one tile after another ("turns"): the first operands of the next one are loaded while results are stored. Tensors are
TMA descriptors of (B, H, N, D): what lies outside is 0 when read and omitted when written.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sigattn.ops.triton import activation

# Elementwise functions are the portable kernels' own.
reciprocal: Any = gluon.jit(activation.reciprocal.fn)
special_reciprocal: Any = gluon.jit(activation.special_reciprocal.fn)
fast_sigmoid: Any = gluon.jit(activation.fast_sigmoid.fn)
LOG2E, Z_TO_HALF = activation.LOG2E, activation.Z_TO_HALF
logit_gradient: Any = gluon.jit(activation.logit_gradient.fn)


class Sizes(NamedTuple):
    """Numbers of queries, keys and query heads of a sample, position of its first query, and the tile scheduler's."""

    len_q: Any
    len_k: Any
    heads: Any
    query_offset: Any
    batch_heads: Any  # heads of all samples (of queries, or of keys in the kernel of dK and dV)
    section: Any  # heads whose tiles are ordered by length together
    turns: Any  # of this program


class Scales(NamedTuple):
    """Factors and terms, as in the portable kernels (triton/args.py): z = z · Q Kᵀ + bias."""

    z: float
    bias: float
    unit: float  # 2^-shift of float16 weights
    lower: float  # takes dS from their power of two to its own
    out: float  # factor of O and dV
    logit: float  # of dQ and dK
    lift: float = 0.0  # logarithm of the factor of weights


class HopperOptions(NamedTuple):
    """Compile-time arguments."""

    D: int  # width of a tile, at least the head size
    BLOCK: int  # these two and SIGMOID: as in ``tuning.HopperConfig``
    STAGES: int
    GROUP: int = 1  # query heads that share a key head
    CAUSAL: bool = False
    SIGMOID: str = "paired"
    SHIFTED: bool = False
    NORMALIZE: bool = False  # weights are divided by their row's sum
    BIAS: str = "number"  # or "tensor", with a bias for each head
    WARP_GROUPS: int = 2  # that compute
    ROWS: int = 64  # queries or keys of each


class HeadBias(NamedTuple):
    """Pointer to the biases of heads, and its strides along samples and heads."""

    pointer: Any
    b: Any
    h: Any


@gluon.jit
def reciprocal_of_some(d, OPT: gl.constexpr):
    """Return 1/d, a quarter ("paired": the same as ``activation.reciprocal_of_some``) or half of them by MUFU."""
    ROWS: gl.constexpr = d.shape[0]
    COLUMNS: gl.constexpr = d.shape[1]
    fours = gl.permute(gl.reshape(d, (ROWS, COLUMNS // 16, 2, 2, 4)), (0, 1, 4, 2, 3))
    x, y = gl.split(fours)
    if OPT.SIGMOID == "paired":
        u, v = gl.split(x)
        x = gl.join(special_reciprocal(u), reciprocal(v))
    else:
        x = special_reciprocal(x)
    r = gl.join(x, reciprocal(y))
    r = gl.reshape(gl.permute(r, (0, 1, 3, 4, 2)), (ROWS, COLUMNS))
    return gl.convert_layout(r, d.type.layout, assert_trivial=True)


@gluon.jit
def load_bias(bias, scales, b, h, OPT: gl.constexpr):
    """Return the bias of a head as a term of z, -log₂e · b."""
    if OPT.BIAS == "tensor":
        term = gl.load(bias.pointer + b * bias.b + h * bias.h).to(gl.float32) * -LOG2E
    else:
        term = scales.bias
    return term


@gluon.jit
def weights(logits, scales, bias, i, j, edge, OPT: gl.constexpr):
    """Return P from Q Kᵀ, times 2^shift with SHIFTED; if ``edge``, 0 where key j lies after position i."""
    z = logits * scales.z + bias
    if OPT.SIGMOID == "fast":
        p = fast_sigmoid(logits * (scales.z * Z_TO_HALF) + bias * Z_TO_HALF)
    elif OPT.SIGMOID == "rcp":
        p = special_reciprocal(1.0 + gl.exp2(z))
        if OPT.SHIFTED:
            p = p * (1.0 / scales.unit)
    else:  # two neighbours, both in one thread, share a reciprocal
        gl.static_assert(OPT.SIGMOID == "paired" or OPT.SIGMOID == "paired-half" or OPT.SIGMOID == "paired-rcp")
        e = gl.exp2(gl.minimum(z, 60.0, propagate_nan=tl.PropagateNan.ALL))
        e, f = gl.split(gl.reshape(e, (e.shape[0], e.shape[1] // 2, 2)))
        d = 1.0 + e
        product = d * f + d  # (1 + e) (1 + f)
        r = special_reciprocal(product) if OPT.SIGMOID == "paired-rcp" else reciprocal_of_some(product, OPT)
        if OPT.SHIFTED:
            r = r * (1.0 / scales.unit)
        p = gl.reshape(gl.join(r * f + r, r * d), z.shape)
        p = gl.convert_layout(p, logits.type.layout, assert_trivial=True)
    # Without a causal mask never taken, but the assembler moves no code over the branch: without it, half of σ was
    # scheduled behind the wait for the products that it should overlap with.
    if edge:
        p = gl.where(j[None, :] <= i[:, None], p, 0.0)
    return p


@gluon.jit
def load_row_term(row_terms, INDEX: gl.constexpr, start, offsets, len_q):
    """Return a term of rows start + offsets, 0 beyond len_q: the bias as a term of z (0), gain (1) or dO · O (2)."""
    return gl.load(row_terms + (4 * start + INDEX) + 4 * offsets, mask=offsets < len_q - start, other=0.0)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return new barriers that complete a phase after a number of arrivals; a fence must precede their use."""
    memory = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(memory.index(i), count=ARRIVALS)
    return memory


@gluon.jit
def transposed(ring, slot, ROWS: gl.constexpr, D: gl.constexpr):
    """Return a tile as the second factor of a product over features: [D, ROWS]."""
    return ring.index(slot).reshape([ROWS, D]).permute([1, 0])


@gluon.jit
def tile_index(turn, OPT: gl.constexpr):
    """Return the index of a program's tile; with CAUSAL every second turn is reversed: short tiles follow long ones."""
    programs = gl.num_programs(0)
    index = gl.program_id(0)
    if OPT.CAUSAL:
        if turn % 2 == 1:
            index = programs - 1 - index
    return turn * programs + index


@gluon.jit
def num_turns(tiles, OPT: gl.constexpr):
    """Return the number of turns of this program, for a number of tiles."""
    programs = gl.num_programs(0)
    turns = tiles // programs
    index = gl.program_id(0)
    if OPT.CAUSAL:
        if turns % 2 == 1:
            index = programs - 1 - index
    if index < tiles % programs:
        turns += 1
    return turns


@gluon.jit
def head_and_tile(index, tiles, sizes):
    """Return a head and one of its tiles. In a section of heads the longest tiles of all heads come first.

    With sections of one head, programs that run at the same time walk the same head, which they read from the cache.
    Under a causal mask short tiles would be left for the end: there a section has as many heads as the cache holds.
    """
    first = index // (sizes.section * tiles) * sizes.section
    width = gl.minimum(sizes.section, sizes.batch_heads - first)
    index = index % (sizes.section * tiles)
    return first + index % width, index // width


@gluon.jit
def query_tile(turn, sizes, OPT: gl.constexpr):
    """Return a turn's sample, head, first query, number of tiles of keys, and how many of them need no mask."""
    ROWS: gl.constexpr = OPT.WARP_GROUPS * OPT.ROWS
    row_tiles = gl.cdiv(sizes.len_q, ROWS)
    head, row_tile = head_and_tile(tile_index(turn, OPT), row_tiles, sizes)
    if OPT.CAUSAL:
        row_tile = row_tiles - 1 - row_tile
    start_m = row_tile * ROWS
    tiles = gl.cdiv(sizes.len_k, OPT.BLOCK)
    # at least all; the compiler does not know that query_offset is 0 or more, which keeps the branch in ``weights``
    full_tiles = tiles + sizes.query_offset
    if OPT.CAUSAL:
        last = sizes.query_offset + gl.minimum(start_m + ROWS, sizes.len_q)
        tiles = gl.maximum(gl.cdiv(gl.minimum(sizes.len_k, last), OPT.BLOCK), 1)
        full_tiles = (sizes.query_offset + start_m + 1) // OPT.BLOCK
    return head // sizes.heads, head % sizes.heads, start_m, tiles, full_tiles


@gluon.jit
def key_tile(turn, sizes, OPT: gl.constexpr):
    """Return a turn's sample, key head, first key, first query, number of tiles of queries, and how many are masked."""
    ROWS: gl.constexpr = OPT.WARP_GROUPS * OPT.ROWS
    key_tiles = gl.cdiv(sizes.len_k, ROWS)
    kv_heads = sizes.heads // OPT.GROUP
    head, tile = head_and_tile(tile_index(turn, OPT), key_tiles, sizes)
    start_n = tile * ROWS  # under a causal mask the first keys have the most queries
    first_query = 0
    edges = gl.minimum(sizes.query_offset, 0)  # 0, but the compiler does not know that (``weights``)
    if OPT.CAUSAL:
        first_query = gl.minimum(gl.maximum(start_n - sizes.query_offset, 0) // OPT.BLOCK * OPT.BLOCK, sizes.len_q)
        edges = gl.maximum(gl.cdiv(start_n + ROWS - 1 - sizes.query_offset - first_query, OPT.BLOCK), 0)
    tiles = gl.cdiv(sizes.len_q - first_query, OPT.BLOCK)
    return head // kv_heads, head % kv_heads, start_n, first_query, tiles, edges
