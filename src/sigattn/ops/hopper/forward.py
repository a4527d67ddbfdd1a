"""Forward kernel for Hopper: three groups of warps (four for heads of up to 64 features) with 64 queries each.

P V of a tile runs while its group computes the weights of the next one. The groups issue their products in turn, by a
baton that each passes to the next, so that while one group computes weights, the products of the others run. With
NORMALIZE the portable kernel computes tiles again in which the sum of a row underflows (REPAIR).
"""

from typing import Any, NamedTuple

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

from sigattn.ops.hopper.common import HeadBias, Sizes, barriers, load_bias, num_turns, query_tile, transposed, weights


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
    """Compute the output of 64 queries of each group, with NORMALIZE also sums of rows; arguments as in common.py."""
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
    if GROUPS == 3:
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
    else:
        gl.static_assert(GROUPS == 4)
        gl.warp_specialize(
            [
                (consume, (out, row_sums, bias, memory, sizes, scales, gl.constexpr(0), OPT)),
                (consume, (out, row_sums, bias, memory, sizes, scales, gl.constexpr(1), OPT)),
                (consume, (out, row_sums, bias, memory, sizes, scales, gl.constexpr(2), OPT)),
                (consume, (out, row_sums, bias, memory, sizes, scales, gl.constexpr(3), OPT)),
                (produce, (query, key, value, memory, sizes, OPT)),
            ],
            [4, 4, 4, 4],
            [112, 112, 112, 24],
        )
