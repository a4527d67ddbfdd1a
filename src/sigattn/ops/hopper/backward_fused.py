"""Backward in one kernel for Hopper, in Gluon: ``hopper_bwd_dkdv_kernel`` with dQ too, added atomically.

    dV = Pᵀ dO     dP = dO Vᵀ     dS = P ∘ (1 − P) ∘ dP     dQ = scale · dS K     dK = scale · dSᵀ Q

Five products instead of seven, but dQ is added in no fixed order. Each group of four warps has 64 keys and walks the
queries. dS goes to shared memory, where it covers both groups' 128 keys: each group then computes half of dQ's columns,
so that values are summed over 128 keys before they are added to memory. That product is issued a tile later, together
with that of dK, when the other group has long written its part: no group waits for the other while it has work of its
own. A program may have several tiles of keys; the first queries of the next one are loaded while gradients are stored.
It has never run on a GPU.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sigattn.ops.hopper.backward import allocate, produce_queries
from sigattn.ops.hopper.common import Sizes, barriers, key_tile, logit_gradient, num_turns, transposed, weights

__all__ = ["hopper_bwd_fused_kernel"]


@gluon.jit
def partial_dq(keys, ds_ring, ds_full, step, WARP_GROUP: gl.constexpr, OPT: gl.constexpr):
    """Issue dS K over 128 keys, for a step's queries and half of the columns: [BLOCK, D / 2]."""
    BLOCK: gl.constexpr = OPT.BLOCK
    HALF: gl.constexpr = OPT.D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    # for step -1 nothing was written, and a wait for the phase before the first one returns at once
    buffer = (step + 2) % 2
    mbarrier.wait(ds_full.index(buffer), (step + 2) // 2 - 1 & 1)
    dq = gl.zeros([BLOCK, HALF], gl.float32, layout)
    for g in gl.static_range(2):
        ds = ds_ring.index(buffer).slice(g * OPT.ROWS, OPT.ROWS, 0).permute([1, 0])  # [BLOCK, ROWS], (queries, keys)
        k = keys.index(g).reshape([OPT.ROWS, OPT.D]).slice(WARP_GROUP * HALF, HALF, 1)  # [ROWS, D / 2]
        dq = warpgroup_mma(ds, k, dq, use_acc=g > 0, is_async=True)
    return dq


@gluon.jit
def add_dq(grad_query, dq, row, WARP_GROUP: gl.constexpr, OPT: gl.constexpr):
    """Add half of the columns of a tile of dQ, from a row on, to the sums of all programs."""
    HALF: gl.constexpr = OPT.D // 2
    layout: gl.constexpr = dq.type.layout
    rows = gl.arange(0, OPT.BLOCK, gl.SliceLayout(1, layout))
    columns = WARP_GROUP * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    add_pairs(grad_query + row * OPT.D + rows[:, None] * OPT.D + columns[None, :], dq)


@gluon.jit
def add_pairs(pointers, x):
    """Add x atomically at its addresses, two neighbours, both in one thread, with one instruction."""
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v2.f32 [$2], {$4, $5}; mov.b32 $0, 0; mov.b32 $1, 0;",
        "=r,=r,l,l,f,f",
        [pointers.to(gl.int64), x],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def consume(
    grad_query, grad_key, grad_value, memory, ds_ring, ds_full, ds_empty, sizes, scales, WARP_GROUP: gl.constexpr,
    OPT: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of one group's 64 keys, and half of what 128 keys add to dQ, turn after turn."""
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
    padded = gl.cdiv(sizes.len_q, BLOCK) * BLOCK
    count = 0  # tiles so far
    for turn in range(sizes.turns):
        b, h_kv, start_n, first_query, tiles, edges = key_tile(turn, sizes, OPT)
        start = start_n + WARP_GROUP * ROWS
        j = start + gl.arange(0, ROWS, gl.SliceLayout(1, tile_layout))
        acc_k = gl.zeros([ROWS, D], gl.float32, out_layout)
        acc_v = gl.zeros([ROWS, D], gl.float32, out_layout)
        head = (b * (sizes.heads // OPT.GROUP) + h_kv) * OPT.GROUP
        head_row = gl.cast(head, gl.int64) * padded  # first row of the head in dQ
        row = head_row  # first row of the tile before
        tile = 0
        for g in gl.static_range(2):  # dQ needs the keys of the other group too
            mbarrier.wait(memory.own_full.index(g), turn & 1)
        for step in range(OPT.GROUP * tiles):
            slot, buffer = count % OPT.STAGES, count % 2
            mbarrier.wait(memory.full.index(slot), count // OPT.STAGES & 1)
            logits = warpgroup_mma(k, transposed(memory.first, slot, BLOCK, D), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, transposed(memory.second, slot, BLOCK, D), zeros, use_acc=False, is_async=True)
            logits = warpgroup_mma_wait(1, deps=[logits])
            i = sizes.query_offset + first_query + tile * BLOCK + offs_m
            # rows are keys and columns queries here; so -j and -i are compared
            p = weights(logits, scales, -j, -i, tile < edges, OPT)
            operand = gl.convert_layout(p.to(grad_value.dtype), operand_layout)
            dv = warpgroup_mma(operand, memory.second.index(slot).reshape([BLOCK, D]), acc_v, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = logit_gradient(p, dp, scales.unit, scales.lower, OPT.SHIFTED).to(grad_key.dtype)
            operand_ds = gl.convert_layout(ds, operand_layout)
            dk = warpgroup_mma(operand_ds, memory.first.index(slot).reshape([BLOCK, D]), acc_k, is_async=True)
            mbarrier.wait(ds_empty.index(buffer), count // 2 & 1 ^ 1)
            ds_ring.index(buffer).slice(WARP_GROUP * ROWS, ROWS, 0).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(buffer))
            # in the first step of a turn this is made of dS of the turn before, and not used
            dq = partial_dq(memory.own_first, ds_ring, ds_full, count - 1, WARP_GROUP, OPT)
            acc_v, acc_k, dq = warpgroup_mma_wait(0, deps=[dv, dk, dq])
            mbarrier.arrive(memory.empty.index(slot))
            mbarrier.arrive(ds_empty.index(buffer ^ 1), pred=step > 0)
            if step > 0:
                add_dq(grad_query, dq, row, WARP_GROUP, OPT)
            row = head_row + first_query + tile * BLOCK
            count += 1
            tile += 1
            if tile == tiles:
                tile = 0
                head_row += padded
        last = count - 1
        dq = partial_dq(memory.own_first, ds_ring, ds_full, last, WARP_GROUP, OPT)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(ds_empty.index((last + 2) % 2), pred=tiles > 0)
        if tiles > 0:
            add_dq(grad_query, dq, row, WARP_GROUP, OPT)
        # when the other group too has read the keys, the memory of keys and values takes the gradients
        mbarrier.wait(ds_empty.index((last + 2) % 2), (last + 2) // 2 - 1 & 1)
        k.store((acc_k * scales.logit).to(grad_key.dtype))
        v.store((acc_v * scales.out).to(grad_value.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(grad_key, [b, h_kv, start, 0], own_keys)
        tma.async_copy_shared_to_global(grad_value, [b, h_kv, start, 0], own_values)
        tma.store_wait(0)
        mbarrier.arrive(memory.own_empty.index(WARP_GROUP))


@gluon.jit(do_not_specialize=["len_q", "len_k", "batch_heads", "query_offset"])
def hopper_bwd_fused_kernel(
    query, key, value, grad_out, grad_query, grad_key, grad_value, len_q, len_k, heads, batch_heads, query_offset,
    scales, OPT: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of tiles of 128 keys, and add what they contribute to dQ / scale.

    grad_query: (B·Hq, N, D) in float32, where N is a multiple of BLOCK; rows beyond the last query get 0. The tiles of
    K and V have a swizzle of D bytes, so that half of their columns are contiguous. common.py describes the arguments.
    """
    memory = allocate(key, value, query, grad_out, OPT)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * OPT.BLOCK, element_bitwidth=16, rank=2)
    ds_ring = gl.allocate_shared_memory(query.dtype, [2, 2 * OPT.ROWS, OPT.BLOCK], ds_layout)
    ds_full, ds_empty = barriers(2, 2), barriers(2, 2)
    fence_async_shared()
    sizes = Sizes(len_q, len_k, heads, query_offset, num_turns(gl.cdiv(len_k, 2 * OPT.ROWS) * batch_heads, OPT))
    gl.warp_specialize(
        [
            (consume, (grad_query, grad_key, grad_value, memory, ds_ring, ds_full, ds_empty, sizes, scales,
                       gl.constexpr(0), OPT)),
            (consume, (grad_query, grad_key, grad_value, memory, ds_ring, ds_full, ds_empty, sizes, scales,
                       gl.constexpr(1), OPT)),
            (produce_queries, (query, key, value, grad_out, memory, sizes, OPT)),
        ],
        [4, 4],
        [OPT.REGISTERS, 24],
    )  # fmt: skip
