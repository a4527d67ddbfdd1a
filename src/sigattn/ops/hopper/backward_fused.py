"""The backward for Hopper in one kernel, in Gluon: ``hopper_bwd_dkdv_kernel`` with dQ too, added atomically.

    dV = Pᵀ dO     dP = dO Vᵀ     dS = P ∘ (1 − P) ∘ dP     dQ = scale · dS K     dK = scale · dSᵀ Q

Five products instead of seven, at the price of the order in which dQ is added. Each group of four warps has 64 keys and
walks the queries. dS goes to shared memory, where both groups' 128 keys meet: each group then makes half of dQ's
columns, so that what is added to memory is summed over 128 keys first. That product is issued a tile later, together
with dK's, when the other group has long written its part: no group waits for the other while there is work of its own.
A program may have many tiles of keys; the next one's first queries are on their way while gradients are written. Never
run on a GPU.
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

from sigattn.ops.hopper.backward import keys_of_turn, logit_gradient, places, produce_queries, transposed
from sigattn.ops.hopper.forward import barriers, turns_of, weights


@gluon.jit
def partial_query(
    keys, ds_ring, ds_full, step, GROUP_OF_WARPS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Issue dS K over 128 keys, for a step's queries and half of the columns: (BLOCK, D / 2)."""
    HALF: gl.constexpr = D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    # of step -1 nothing was written, and a barrier that never turned counts as one that has
    buffer = (step + 2) % 2
    mbarrier.wait(ds_full.index(buffer), (step + 2) // 2 - 1 & 1)
    dq = gl.zeros([BLOCK, HALF], gl.float32, layout)
    for g in gl.static_range(2):
        ds = ds_ring.index(buffer).slice(g * ROWS, ROWS, 0).permute([1, 0])  # (queries, keys)
        k = keys.index(g).reshape([ROWS, D]).slice(GROUP_OF_WARPS * HALF, HALF, 1)
        dq = warpgroup_mma(ds, k, dq, use_acc=g > 0, is_async=True)
    return dq


@gluon.jit
def add_query(
    grad_query, dq, row, GROUP_OF_WARPS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Add half of the columns of a tile of dQ, from a row on, to what other programs add there."""
    HALF: gl.constexpr = D // 2
    layout: gl.constexpr = dq.type.layout
    rows = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    columns = GROUP_OF_WARPS * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    at = grad_query + row * D + rows[:, None] * D + columns[None, :]
    add_pairs(at, dq)


@gluon.jit
def add_pairs(at, x):
    """Add x atomically at its addresses, two neighbours, which a thread holds both of, with one instruction."""
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v2.f32 [$2], {$4, $5}; mov.b32 $0, 0; mov.b32 $1, 0;",
        "=r,=r,l,l,f,f",
        [at.to(gl.int64), x],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def consume(
    grad_query, grad_key, grad_value, shared, problem, scalars, GROUP_OF_WARPS: gl.constexpr, GROUP: gl.constexpr,
    D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, SIGMOID: gl.constexpr,
    SHIFTED: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The gradients dK and dV of one group's 64 keys, and half of what 128 keys add to dQ, turn after turn."""
    memory, ds_ring, ds_full, ds_empty = shared
    own_keys, own_values, ring, grads_ring, own_full, own_empty, full, empty = memory
    n, keys, heads, query_offset, turns = problem
    z_scale, z_bias, unit, lower, out_scale, logit_scale = scalars
    tile_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    my_keys, my_values = own_keys.index(GROUP_OF_WARPS), own_values.index(GROUP_OF_WARPS)
    k, v = my_keys.reshape([ROWS, D]), my_values.reshape([ROWS, D])
    rows = gl.arange(0, BLOCK, gl.SliceLayout(0, tile_layout))
    empty_tile = gl.zeros([ROWS, BLOCK], gl.float32, tile_layout)
    padded = gl.cdiv(n, BLOCK) * BLOCK
    count = 0  # tiles so far
    for turn in range(turns):
        b, h_kv, column_start, first_query, tiles, edges = keys_of_turn(
            turn, n, keys, heads, query_offset, GROUP, CAUSAL, BLOCK, ROWS
        )
        start = column_start + GROUP_OF_WARPS * ROWS
        j = start + gl.arange(0, ROWS, gl.SliceLayout(1, tile_layout))
        acc_k = gl.zeros([ROWS, D], gl.float32, out_layout)
        acc_v = gl.zeros([ROWS, D], gl.float32, out_layout)
        head_row = gl.cast((b * (heads // GROUP) + h_kv) * GROUP, gl.int64) * padded  # where a head begins in dQ
        row = head_row  # of dQ, of the tile before
        tile = 0
        for g in gl.static_range(2):  # the other group's keys take part in dQ
            mbarrier.wait(own_full.index(g), turn & 1)
        for step in range(GROUP * tiles):
            stage, buffer = count % STAGES, count % 2
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            products = warpgroup_mma(k, transposed(ring, stage, BLOCK, D), empty_tile, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, transposed(grads_ring, stage, BLOCK, D), empty_tile, use_acc=False, is_async=True)
            products = warpgroup_mma_wait(1, deps=[products])
            i = query_offset + first_query + tile * BLOCK + rows
            # tiles stand transposed here: rows are keys, columns queries; so -j and -i are compared
            p = weights(products, z_scale, z_bias, unit, -j, -i, tile < edges, SIGMOID, SHIFTED)  # (keys, queries)
            operand = gl.convert_layout(p.to(grad_value.dtype), operand_layout)
            dv = warpgroup_mma(operand, grads_ring.index(stage).reshape([BLOCK, D]), acc_v, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = logit_gradient(p, dp, unit, lower, SHIFTED).to(grad_key.dtype)
            dk = warpgroup_mma(
                gl.convert_layout(ds, operand_layout), ring.index(stage).reshape([BLOCK, D]), acc_k, is_async=True
            )
            mbarrier.wait(ds_empty.index(buffer), count // 2 & 1 ^ 1)
            ds_ring.index(buffer).slice(GROUP_OF_WARPS * ROWS, ROWS, 0).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(buffer))
            # of a turn's first step this is made of an earlier turn's dS, and not used
            dq = partial_query(own_keys, ds_ring, ds_full, count - 1, GROUP_OF_WARPS, D, BLOCK, ROWS)
            acc_v, acc_k, dq = warpgroup_mma_wait(0, deps=[dv, dk, dq])
            mbarrier.arrive(empty.index(stage))
            mbarrier.arrive(ds_empty.index(buffer ^ 1), pred=step > 0)
            if step > 0:
                add_query(grad_query, dq, row, GROUP_OF_WARPS, D, BLOCK)
            row = head_row + first_query + tile * BLOCK
            count += 1
            tile += 1
            if tile == tiles:
                tile = 0
                head_row += padded
        last = count - 1
        dq = partial_query(own_keys, ds_ring, ds_full, last, GROUP_OF_WARPS, D, BLOCK, ROWS)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(ds_empty.index((last + 2) % 2), pred=tiles > 0)
        if tiles > 0:
            add_query(grad_query, dq, row, GROUP_OF_WARPS, D, BLOCK)
        # when the other group, too, is done with the keys, their place and that of the values take the gradients
        mbarrier.wait(ds_empty.index((last + 2) % 2), (last + 2) // 2 - 1 & 1)
        k.store((acc_k * logit_scale).to(grad_key.dtype))
        v.store((acc_v * out_scale).to(grad_value.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(grad_key, [b, h_kv, start, 0], my_keys)
        tma.async_copy_shared_to_global(grad_value, [b, h_kv, start, 0], my_values)
        tma.store_wait(0)
        mbarrier.arrive(own_empty.index(GROUP_OF_WARPS))


@gluon.jit(do_not_specialize=["n", "keys", "batch_heads", "query_offset"])
def hopper_bwd_fused_kernel(
    query, key, value, grad_out, grad_query, grad_key, grad_value, n, keys, heads, batch_heads, query_offset,
    z_scale, z_bias, unit, lower, out_scale, logit_scale,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    SIGMOID: gl.constexpr, SHIFTED: gl.constexpr, ROWS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """The gradients dK and dV of tiles of 128 keys of one key head, and what they add to dQ / scale.

    That is in grad_query, (B·Hq, N, D) in float32, where N is a multiple of BLOCK and rows beyond the last get 0. The
    tiles of K and V stand with a swizzle of D bytes, which leaves half of the columns in one piece.
    """
    memory = places(key, value, query, grad_out, STAGES, BLOCK, ROWS, D)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * BLOCK, element_bitwidth=16, rank=2)
    ds_ring = gl.allocate_shared_memory(query.dtype, [2, 2 * ROWS, BLOCK], ds_layout)
    ds_full, ds_empty = barriers(2, 2), barriers(2, 2)
    fence_async_shared()
    shared = (memory, ds_ring, ds_full, ds_empty)
    problem = (n, keys, heads, query_offset, turns_of(gl.cdiv(keys, 2 * ROWS) * batch_heads, CAUSAL))
    scalars = (z_scale, z_bias, unit, lower, out_scale, logit_scale)
    gl.warp_specialize(
        [
            (consume, (grad_query, grad_key, grad_value, shared, problem, scalars, gl.constexpr(0), GROUP, D, BLOCK,
                       STAGES, CAUSAL, SIGMOID, SHIFTED, ROWS)),
            (consume, (grad_query, grad_key, grad_value, shared, problem, scalars, gl.constexpr(1), GROUP, D, BLOCK,
                       STAGES, CAUSAL, SIGMOID, SHIFTED, ROWS)),
            (produce_queries, (query, key, value, grad_out, memory, problem, GROUP, D, BLOCK, STAGES, CAUSAL, ROWS)),
        ],
        [4, 4],
        [REGISTERS, 24],
    )  # fmt: skip
