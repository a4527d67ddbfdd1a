"""Backward kernels for Hopper: each of two groups of warps holds 64 keys, or queries, and walks the others.

    dV = Pᵀ dO     dP = dO Vᵀ     dS = P ∘ (1 − P) ∘ dP     dQ = scale · dS K     dK = scale · dSᵀ Q

In ``hopper_bwd_dkdv_kernel`` tiles are (keys, queries), so P and dS are in registers as the second products need them,
and nothing is transposed. ``hopper_bwd_dq_kernel`` walks the keys. Seven products instead of five, added in a fixed
order. σ runs during the product of dP, and dS during that of dV; the other group fills the gaps.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sigattn.ops.hopper.common import (
    HeadBias,
    Sizes,
    barriers,
    key_tile,
    load_bias,
    load_row_term,
    logit_gradient,
    num_turns,
    query_tile,
    transposed,
    weights,
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
