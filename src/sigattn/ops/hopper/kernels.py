"""Attention kernels for Hopper in Gluon, the lower level of Triton: TMA, wgmma and mbarriers, warps specialised.

One warp loads tiles by TMA into rings of slots in shared memory, and groups of four warps compute. A program works on
one tile after another ("turns"): the first operands of the next one are loaded while results are stored. Tensors are
TMA descriptors of (B, H, N, D): what lies outside is 0 when read and omitted when written.

``hopper_fwd_kernel``: three groups with 64 queries each. P V of a tile runs while its group computes the weights of the
next one. The groups issue their products in turn, by a baton that each passes to the next, so that while one group
computes weights, the products of the others run. With NORMALIZE the portable kernel computes tiles again in which the
sum of a row underflows (REPAIR).

    dV = Pᵀ dO     dP = dO Vᵀ     dS = P ∘ (1 − P) ∘ dP     dQ = scale · dS K     dK = scale · dSᵀ Q

``hopper_bwd_dkdv_kernel``: each of two groups has 64 keys and walks the queries; tiles are (keys, queries), so P and dS
are in registers as the second products need them, and nothing is transposed. ``hopper_bwd_dq_kernel``: each has 64
queries and walks the keys. Seven products instead of five, added in a fixed order. σ runs during the product of dP, and
dS during that of dV; the other group fills the gaps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

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
def reciprocal_of_some(d):
    """Return 1/d; the same numbers as ``activation.reciprocal_of_some``."""
    ROWS: gl.constexpr = d.shape[0]
    COLUMNS: gl.constexpr = d.shape[1]
    fours = gl.permute(gl.reshape(d, (ROWS, COLUMNS // 16, 2, 2, 4)), (0, 1, 4, 2, 3))
    x, y = gl.split(fours)
    u, v = gl.split(x)
    r = gl.join(gl.join(special_reciprocal(u), reciprocal(v)), reciprocal(y))
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
    else:  # two neighbours, both in one thread, share a reciprocal
        gl.static_assert(OPT.SIGMOID == "paired" or OPT.SIGMOID == "paired-rcp")
        e = gl.exp2(gl.minimum(z, 60.0, propagate_nan=tl.PropagateNan.ALL))
        e, f = gl.split(gl.reshape(e, (e.shape[0], e.shape[1] // 2, 2)))
        d = 1.0 + e
        r = reciprocal_of_some(d * f + d) if OPT.SIGMOID == "paired" else special_reciprocal(d * f + d)
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


class ForwardMemory(NamedTuple):
    """Tiles of the groups, rings of K and V, barriers for full and empty slots, batons."""

    queries: Any
    outputs: Any
    k_ring: Any
    v_ring: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    batons: Any


@gluon.jit
def produce(query, key, value, memory, sizes, OPT: gl.constexpr):
    """Load queries, then tile after tile of K and V, each into its ring as soon as all groups have left the slot."""
    D: gl.constexpr = OPT.D
    BLOCK: gl.constexpr = OPT.BLOCK
    GROUPS: gl.constexpr = OPT.WARP_GROUPS
    count = 0  # tiles so far
    for turn in range(sizes.turns):
        b, h, start_m, tiles, _full = query_tile(turn, sizes, OPT)
        for g in gl.static_range(GROUPS):
            mbarrier.wait(memory.q_empty.index(g), turn & 1 ^ 1)
            mbarrier.expect(memory.q_full.index(g), OPT.ROWS * D * 2)
            origin = [b, h, start_m + g * OPT.ROWS, 0]
            tma.async_copy_global_to_shared(query, origin, memory.q_full.index(g), memory.queries.index(g))
        for tile in range(tiles):
            slot = count % OPT.STAGES
            phase = count // OPT.STAGES & 1 ^ 1
            origin = [b, h // OPT.GROUP, tile * BLOCK, 0]
            mbarrier.wait(memory.k_empty.index(slot), phase)
            mbarrier.expect(memory.k_full.index(slot), BLOCK * D * 2)
            tma.async_copy_global_to_shared(key, origin, memory.k_full.index(slot), memory.k_ring.index(slot))
            mbarrier.wait(memory.v_empty.index(slot), phase)
            mbarrier.expect(memory.v_full.index(slot), BLOCK * D * 2)
            tma.async_copy_global_to_shared(value, origin, memory.v_full.index(slot), memory.v_ring.index(slot))
            count += 1


@gluon.jit
def take_baton(memory, step, WARP_GROUP: gl.constexpr):
    """Wait until the group before this one has issued its products of a step; the first group's of the step before."""
    mbarrier.wait(memory.batons.index(WARP_GROUP), step & 1 ^ (WARP_GROUP == 0))


@gluon.jit
def pass_baton(memory, WARP_GROUP: gl.constexpr, OPT: gl.constexpr):
    """Let the next group issue its products."""
    mbarrier.arrive(memory.batons.index((WARP_GROUP + 1) % OPT.WARP_GROUPS))


@gluon.jit
def consume(out, row_sums, bias, memory, sizes, scales, WARP_GROUP: gl.constexpr, OPT: gl.constexpr):
    """Compute the output of one group's 64 queries. A step issues S of one tile, and P V of the one before."""
    D: gl.constexpr = OPT.D
    BLOCK: gl.constexpr = OPT.BLOCK
    ROWS: gl.constexpr = OPT.ROWS
    logits_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    q = memory.queries.index(WARP_GROUP).reshape([ROWS, D])
    output = memory.outputs.index(WARP_GROUP)
    offs_n = gl.arange(0, BLOCK, gl.SliceLayout(0, logits_layout))
    empty = gl.zeros([ROWS, BLOCK], gl.float32, logits_layout)
    count = 0  # tiles of earlier turns
    for turn in range(sizes.turns):
        b, h, start_m, tiles, full_tiles = query_tile(turn, sizes, OPT)
        start = start_m + WARP_GROUP * ROWS
        z_bias = load_bias(bias, scales, b, h, OPT)
        rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, logits_layout))
        i = sizes.query_offset + rows  # the last key that each query may see
        if OPT.NORMALIZE:  # keys beyond the last would count in the sum
            i = gl.minimum(i, sizes.len_k - 1) if OPT.CAUSAL else i * 0 + (sizes.len_k - 1)
            full_tiles = gl.minimum(full_tiles, sizes.len_k // BLOCK)
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, logits_layout))
        acc = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, out_layout))  # [ROWS, D]

        mbarrier.wait(memory.q_full.index(WARP_GROUP), turn & 1)
        slot = count % OPT.STAGES
        mbarrier.wait(memory.k_full.index(slot), count // OPT.STAGES & 1)
        take_baton(memory, count, WARP_GROUP)
        # [ROWS, D] @ [D, BLOCK] -> [ROWS, BLOCK]
        logits = warpgroup_mma(q, transposed(memory.k_ring, slot, BLOCK, D), empty, use_acc=False, is_async=True)
        pass_baton(memory, WARP_GROUP, OPT)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(memory.k_empty.index(slot))
        p = weights(logits, scales, z_bias, i, offs_n, full_tiles < 1, OPT)
        if OPT.NORMALIZE:
            total += gl.sum(p, 1)
        operand = gl.convert_layout(p.to(out.dtype), weights_layout)
        for tile in range(1, tiles):
            k_slot = (count + tile) % OPT.STAGES
            mbarrier.wait(memory.k_full.index(k_slot), (count + tile) // OPT.STAGES & 1)
            k = transposed(memory.k_ring, k_slot, BLOCK, D)
            take_baton(memory, count + tile, WARP_GROUP)
            logits = warpgroup_mma(q, k, empty, use_acc=False, is_async=True)
            v_slot = (count + tile - 1) % OPT.STAGES
            mbarrier.wait(memory.v_full.index(v_slot), (count + tile - 1) // OPT.STAGES & 1)
            # [ROWS, BLOCK] @ [BLOCK, D] -> [ROWS, D], running while this group computes the weights below
            acc = warpgroup_mma(operand, memory.v_ring.index(v_slot).reshape([BLOCK, D]), acc, is_async=True)
            pass_baton(memory, WARP_GROUP, OPT)
            logits = warpgroup_mma_wait(1, deps=[logits])
            mbarrier.arrive(memory.k_empty.index(k_slot))
            p = weights(logits, scales, z_bias, i, tile * BLOCK + offs_n, tile >= full_tiles, OPT)
            if OPT.NORMALIZE:
                total += gl.sum(p, 1)
            next_operand = gl.convert_layout(p.to(out.dtype), weights_layout)
            acc = warpgroup_mma_wait(0, deps=[acc])
            acc = warpgroup_mma_init(acc)
            mbarrier.arrive(memory.v_empty.index(v_slot))
            operand = next_operand
        mbarrier.arrive(memory.q_empty.index(WARP_GROUP))
        count += tiles
        v_slot = (count - 1) % OPT.STAGES
        mbarrier.wait(memory.v_full.index(v_slot), (count - 1) // OPT.STAGES & 1)
        acc = warpgroup_mma(operand, memory.v_ring.index(v_slot).reshape([BLOCK, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(memory.v_empty.index(v_slot))
        if OPT.NORMALIZE:
            pointers = row_sums + 2 * ((b * sizes.heads + h) * sizes.len_q + rows)
            gl.store(pointers, total, mask=rows < sizes.len_q)
            gl.store(pointers + 1, total * 0.0 + scales.lift, mask=rows < sizes.len_q)
            total = gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, out_layout))
            acc = acc / total[:, None]
        tma.store_wait(0)  # the store of the last turn has read its slot
        output.reshape([ROWS, D]).store((acc * scales.out).to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [b, h, start, 0], output)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["bias_b", "bias_h", "len_q", "len_k", "batch_heads", "section", "query_offset"])
def hopper_fwd_kernel(
    query, key, value, out, row_sums, bias, bias_b, bias_h, len_q, len_k, heads, batch_heads, section, query_offset,
    scales, OPT: gl.constexpr,
):  # fmt: skip
    """Compute the output of tiles of 192 queries, and with NORMALIZE the sums of rows; arguments as in common.py."""
    GROUPS: gl.constexpr = OPT.WARP_GROUPS
    own_shape: gl.constexpr = [GROUPS, 1, 1, OPT.ROWS, OPT.D]
    ring_shape: gl.constexpr = [OPT.STAGES, 1, 1, OPT.BLOCK, OPT.D]
    memory = ForwardMemory(
        gl.allocate_shared_memory(query.dtype, own_shape, query.layout),
        gl.allocate_shared_memory(query.dtype, own_shape, query.layout),
        gl.allocate_shared_memory(query.dtype, ring_shape, key.layout),
        gl.allocate_shared_memory(query.dtype, ring_shape, value.layout),
        barriers(GROUPS, 1),
        barriers(GROUPS, 1),
        barriers(OPT.STAGES, 1),
        barriers(OPT.STAGES, GROUPS),
        barriers(OPT.STAGES, 1),
        barriers(OPT.STAGES, GROUPS),
        barriers(GROUPS, 1),
    )
    fence_async_shared()
    turns = num_turns(gl.cdiv(len_q, GROUPS * OPT.ROWS) * batch_heads, OPT)
    sizes = Sizes(len_q, len_k, heads, query_offset, batch_heads, section, turns)
    bias = HeadBias(bias, bias_b, bias_h)
    gl.static_assert(GROUPS == 3)
    gl.warp_specialize(
        [
            (consume, (out, row_sums, bias, memory, sizes, scales, gl.constexpr(0), OPT)),
            (consume, (out, row_sums, bias, memory, sizes, scales, gl.constexpr(1), OPT)),
            (consume, (out, row_sums, bias, memory, sizes, scales, gl.constexpr(2), OPT)),
            (produce, (query, key, value, memory, sizes, OPT)),
        ],
        [4, 4, 4],
        [160, 160, 24],  # registers of a thread
    )


class BackwardMemory(NamedTuple):
    """Shared memory and barriers."""

    own_first: Any  # tiles of two tensors that the groups hold
    own_second: Any
    first: Any  # rings for tiles of two tensors that they walk
    second: Any
    own_full: Any  # barriers of the slots
    own_empty: Any  # released by the slot's group
    full: Any
    empty: Any  # released by both groups


@gluon.jit
def allocate(own_first, own_second, first, second, OPT: gl.constexpr):
    """Return shared memory for the tensors of four descriptors."""
    own_shape: gl.constexpr = [2, 1, 1, OPT.ROWS, OPT.D]
    ring_shape: gl.constexpr = [OPT.STAGES, 1, 1, OPT.BLOCK, OPT.D]
    memory = BackwardMemory(
        gl.allocate_shared_memory(first.dtype, own_shape, own_first.layout),
        gl.allocate_shared_memory(first.dtype, own_shape, own_second.layout),
        gl.allocate_shared_memory(first.dtype, ring_shape, first.layout),
        gl.allocate_shared_memory(first.dtype, ring_shape, second.layout),
        barriers(2, 1),
        barriers(2, 1),
        barriers(OPT.STAGES, 1),
        barriers(OPT.STAGES, 2),
    )
    fence_async_shared()
    return memory


@gluon.jit
def load_own(first, second, memory, b, h, start, turn, OPT: gl.constexpr):
    """Load the tiles that the groups hold in a turn, as soon as they have left the memory."""
    ROWS: gl.constexpr = OPT.ROWS
    for g in gl.static_range(2):
        mbarrier.wait(memory.own_empty.index(g), turn & 1 ^ 1)
        mbarrier.expect(memory.own_full.index(g), 2 * ROWS * OPT.D * 2)
        origin = [b, h, start + g * ROWS, 0]
        tma.async_copy_global_to_shared(first, origin, memory.own_full.index(g), memory.own_first.index(g))
        tma.async_copy_global_to_shared(second, origin, memory.own_full.index(g), memory.own_second.index(g))


@gluon.jit
def load_tiles(first, second, memory, count, b, h, heads, tiles, start, OPT: gl.constexpr):
    """Load tiles of rows from ``start`` on, of some heads one after another, as soon as both groups left a slot."""
    BLOCK: gl.constexpr = OPT.BLOCK
    for step in range(heads * tiles):
        slot = count % OPT.STAGES
        mbarrier.wait(memory.empty.index(slot), count // OPT.STAGES & 1 ^ 1)
        mbarrier.expect(memory.full.index(slot), 2 * BLOCK * OPT.D * 2)
        origin = [b, h + step // tiles, start + step % tiles * BLOCK, 0]
        tma.async_copy_global_to_shared(first, origin, memory.full.index(slot), memory.first.index(slot))
        tma.async_copy_global_to_shared(second, origin, memory.full.index(slot), memory.second.index(slot))
        count += 1
    return count


@gluon.jit
def produce_queries(query, key, value, grad_out, memory, sizes, OPT: gl.constexpr):
    """Load keys and values, then queries and dO of all heads that share them, turn after turn."""
    count = 0  # tiles so far
    for turn in range(sizes.turns):
        b, h_kv, start_n, first_query, tiles, _edges = key_tile(turn, sizes, OPT)
        load_own(key, value, memory, b, h_kv, start_n, turn, OPT)
        count = load_tiles(query, grad_out, memory, count, b, h_kv * OPT.GROUP, OPT.GROUP, tiles, first_query, OPT)


@gluon.jit
def consume_queries(
    grad_key, grad_value, bias, memory, sizes, scales, WARP_GROUP: gl.constexpr, OPT: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of one group's 64 keys, turn after turn."""
    D: gl.constexpr = OPT.D
    BLOCK: gl.constexpr = OPT.BLOCK
    ROWS: gl.constexpr = OPT.ROWS
    tile_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    own_keys, own_values = memory.own_first.index(WARP_GROUP), memory.own_second.index(WARP_GROUP)
    k, v = own_keys.reshape([ROWS, D]), own_values.reshape([ROWS, D])
    offs_m = gl.arange(0, BLOCK, gl.SliceLayout(0, tile_layout))
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, tile_layout)
    count = 0  # tiles so far
    for turn in range(sizes.turns):
        b, h_kv, start_n, first_query, tiles, edges = key_tile(turn, sizes, OPT)
        start = start_n + WARP_GROUP * ROWS
        j = start + gl.arange(0, ROWS, gl.SliceLayout(1, tile_layout))
        acc_k = gl.zeros([ROWS, D], gl.float32, out_layout)
        acc_v = gl.zeros([ROWS, D], gl.float32, out_layout)
        mbarrier.wait(memory.own_full.index(WARP_GROUP), turn & 1)
        for step in range(OPT.GROUP * tiles):
            slot = count % OPT.STAGES
            mbarrier.wait(memory.full.index(slot), count // OPT.STAGES & 1)
            # both [ROWS, D] @ [D, BLOCK] -> [ROWS, BLOCK], (keys, queries)
            logits = warpgroup_mma(k, transposed(memory.first, slot, BLOCK, D), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, transposed(memory.second, slot, BLOCK, D), zeros, use_acc=False, is_async=True)
            tile = step % gl.maximum(tiles, 1)
            h = h_kv * OPT.GROUP + step // gl.maximum(tiles, 1)
            i = sizes.query_offset + first_query + tile * BLOCK + offs_m
            z_bias = load_bias(bias, scales, b, h, OPT)
            logits = warpgroup_mma_wait(1, deps=[logits])
            # rows are keys and columns queries here; so -j and -i are compared
            p = weights(logits, scales, z_bias, -j, -i, tile < edges, OPT)
            operand = gl.convert_layout(p.to(grad_value.dtype), operand_layout)
            # [ROWS, BLOCK] @ [BLOCK, D] -> [ROWS, D]
            dv = warpgroup_mma(operand, memory.second.index(slot).reshape([BLOCK, D]), acc_v, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = logit_gradient(p, p, dp, scales.unit, scales.lower, OPT.SHIFTED)
            operand_ds = gl.convert_layout(ds.to(grad_key.dtype), operand_layout)
            dk = warpgroup_mma(operand_ds, memory.first.index(slot).reshape([BLOCK, D]), acc_k, is_async=True)
            acc_v, acc_k = warpgroup_mma_wait(0, deps=[dv, dk])
            mbarrier.arrive(memory.empty.index(slot))
            count += 1
        # the memory of the keys and values is free now and takes the gradients
        k.store((acc_k * scales.logit).to(grad_key.dtype))
        v.store((acc_v * scales.out).to(grad_value.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(grad_key, [b, h_kv, start, 0], own_keys)
        tma.async_copy_shared_to_global(grad_value, [b, h_kv, start, 0], own_values)
        tma.store_wait(0)
        mbarrier.arrive(memory.own_empty.index(WARP_GROUP))


@gluon.jit(do_not_specialize=["bias_b", "bias_h", "len_q", "len_k", "batch_heads", "section", "query_offset"])
def hopper_bwd_dkdv_kernel(
    query, key, value, grad_out, grad_key, grad_value, bias, bias_b, bias_h, len_q, len_k, heads,
    batch_heads, section, query_offset, scales, OPT: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of tiles of 128 keys; common.py describes the arguments."""
    memory = allocate(key, value, query, grad_out, OPT)
    turns = num_turns(gl.cdiv(len_k, OPT.WARP_GROUPS * OPT.ROWS) * batch_heads, OPT)
    sizes = Sizes(len_q, len_k, heads, query_offset, batch_heads, section, turns)
    bias = HeadBias(bias, bias_b, bias_h)
    gl.warp_specialize(
        [
            (consume_queries, (grad_key, grad_value, bias, memory, sizes, scales, gl.constexpr(0), OPT)),
            (consume_queries, (grad_key, grad_value, bias, memory, sizes, scales, gl.constexpr(1), OPT)),
            (produce_queries, (query, key, value, grad_out, memory, sizes, OPT)),
        ],
        [4, 4],
        [240, 24],  # registers of a thread
    )


@gluon.jit
def produce_keys(query, key, value, grad_out, memory, sizes, OPT: gl.constexpr):
    """Load queries and dO, then the keys and values that they see, turn after turn."""
    count = 0  # tiles so far
    for turn in range(sizes.turns):
        b, h, start_m, tiles, _full = query_tile(turn, sizes, OPT)
        load_own(query, grad_out, memory, b, h, start_m, turn, OPT)
        count = load_tiles(key, value, memory, count, b, h // OPT.GROUP, 1, tiles, 0, OPT)


@gluon.jit
def consume_keys(
    grad_query, row_terms, pitch, bias, memory, sizes, scales, WARP_GROUP: gl.constexpr, OPT: gl.constexpr,
):  # fmt: skip
    """Compute dQ of one group's 64 queries, turn after turn."""
    D: gl.constexpr = OPT.D
    BLOCK: gl.constexpr = OPT.BLOCK
    ROWS: gl.constexpr = OPT.ROWS
    tile_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    own_queries = memory.own_first.index(WARP_GROUP)
    q, do = own_queries.reshape([ROWS, D]), memory.own_second.index(WARP_GROUP).reshape([ROWS, D])
    offs_n = gl.arange(0, BLOCK, gl.SliceLayout(0, tile_layout))
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, tile_layout)
    count = 0  # tiles so far
    for turn in range(sizes.turns):
        b, h, start_m, tiles, full_tiles = query_tile(turn, sizes, OPT)
        start = start_m + WARP_GROUP * ROWS
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, tile_layout))
        i = sizes.query_offset + start + rows
        if OPT.NORMALIZE:
            terms = row_terms + 4 * pitch * (b * sizes.heads + h)
            z_bias = load_row_term(terms, 0, start, rows, sizes.len_q)[:, None]
            gain = load_row_term(terms, 1, start, rows, sizes.len_q)[:, None]
            delta = load_row_term(terms, 2, start, rows, sizes.len_q)[:, None]
        else:
            z_bias = load_bias(bias, scales, b, h, OPT)
        acc = gl.zeros([ROWS, D], gl.float32, out_layout)
        mbarrier.wait(memory.own_full.index(WARP_GROUP), turn & 1)
        for tile in range(tiles):
            slot = count % OPT.STAGES
            mbarrier.wait(memory.full.index(slot), count // OPT.STAGES & 1)
            # both [ROWS, D] @ [D, BLOCK] -> [ROWS, BLOCK]
            logits = warpgroup_mma(q, transposed(memory.first, slot, BLOCK, D), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma(do, transposed(memory.second, slot, BLOCK, D), zeros, use_acc=False, is_async=True)
            logits = warpgroup_mma_wait(1, deps=[logits])
            p = weights(logits, scales, z_bias, i, tile * BLOCK + offs_n, tile >= full_tiles, OPT)
            dp = warpgroup_mma_wait(0, deps=[dp])
            if OPT.NORMALIZE:
                dp = (dp - delta) * gain
            # keys beyond the last have v = 0, and so no gradient
            ds = logit_gradient(p, p, dp, scales.unit, scales.lower, OPT.SHIFTED)
            operand = gl.convert_layout(ds.to(grad_query.dtype), operand_layout)
            # [ROWS, BLOCK] @ [BLOCK, D] -> [ROWS, D]
            dq = warpgroup_mma(operand, memory.first.index(slot).reshape([BLOCK, D]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(memory.empty.index(slot))
            count += 1
        q.store((acc * scales.logit).to(grad_query.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(grad_query, [b, h, start, 0], own_queries)
        tma.store_wait(0)
        mbarrier.arrive(memory.own_empty.index(WARP_GROUP))


@gluon.jit(do_not_specialize=["bias_b", "bias_h", "len_q", "len_k", "batch_heads", "section", "query_offset"])
def hopper_bwd_dq_kernel(
    query, key, value, grad_out, grad_query, row_terms, pitch, bias, bias_b, bias_h, len_q, len_k, heads, batch_heads,
    section, query_offset, scales, OPT: gl.constexpr,
):  # fmt: skip
    """Compute dQ of tiles of 128 queries; common.py describes the arguments."""
    memory = allocate(query, grad_out, key, value, OPT)
    turns = num_turns(gl.cdiv(len_q, OPT.WARP_GROUPS * OPT.ROWS) * batch_heads, OPT)
    sizes = Sizes(len_q, len_k, heads, query_offset, batch_heads, section, turns)
    bias = HeadBias(bias, bias_b, bias_h)
    gl.warp_specialize(
        [
            (consume_keys, (grad_query, row_terms, pitch, bias, memory, sizes, scales, gl.constexpr(0), OPT)),
            (consume_keys, (grad_query, row_terms, pitch, bias, memory, sizes, scales, gl.constexpr(1), OPT)),
            (produce_keys, (query, key, value, grad_out, memory, sizes, OPT)),
        ],
        [4, 4],
        [240, 24],  # registers of a thread
    )
