"""Backward kernel for Hopper, of heads of 33 to 64: dQ, dK and dV by five products instead of seven.

Two groups of warps hold 64 keys each, in registers, and walk the queries; S of the next tile is computed behind dK of
this one. They store dS for a third group, which computes dS K over the keys of both and adds it to dQ in memory, in
float32, by TMA. So the order of these sums is not fixed. A warp loads tiles, as in the other kernels; the keys of a
turn arrive during the turn before.
"""

from typing import Any, NamedTuple

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sigattn.ops.hopper.backward import load_tiles
from sigattn.ops.hopper.common import (
    HeadBias,
    Sizes,
    barriers,
    key_tile,
    load_bias,
    logit_gradient,
    num_turns,
    transposed,
    weights,
)


class FusedMemory(NamedTuple):
    """Tiles of keys and values, rings of the others, results; barriers for slots."""

    k_tiles: Any  # of both groups in two turns
    v_tiles: Any
    first: Any  # queries
    second: Any  # dO
    ds: Any  # two slots for dS of both groups
    dq: Any  # two slots for tiles that are being added
    results: Any  # dK and dV of each group
    keys_full: Any
    keys_empty: Any  # released by the group and by the third one
    full: Any
    empty: Any  # released by both groups
    ds_full: Any
    ds_empty: Any  # released by the third group


@builtin
def add_by_tma(tensor_desc, coord, src, _semantic=None):
    """Add a tile in shared memory to a tensor. Gluon has no function for it in Triton 3.6, later ones another name."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def keys_slot(turn, WARP_GROUP: gl.constexpr):
    """Return the slot of a group's keys and values in a turn, and the parity of its use."""
    return turn % 2 * 2 + WARP_GROUP, turn // 2 & 1


@gluon.jit
def produce(query, key, value, grad_out, memory, sizes, OPT: gl.constexpr):
    """Load keys and values, then queries and dO of all heads that share them, turn after turn."""
    D: gl.constexpr = OPT.D
    ROWS: gl.constexpr = OPT.ROWS
    count = 0  # tiles so far
    for turn in range(sizes.turns):
        b, h_kv, start_n, first_query, tiles, _edges = key_tile(turn, sizes, OPT)
        for g in gl.static_range(2):
            slot, parity = keys_slot(turn, g)
            mbarrier.wait(memory.keys_empty.index(slot), parity ^ 1)
            mbarrier.expect(memory.keys_full.index(slot), 2 * ROWS * D * 2)
            origin = [b, h_kv, start_n + g * ROWS, 0]
            tma.async_copy_global_to_shared(key, origin, memory.keys_full.index(slot), memory.k_tiles.index(slot))
            tma.async_copy_global_to_shared(value, origin, memory.keys_full.index(slot), memory.v_tiles.index(slot))
        count = load_tiles(query, grad_out, memory, count, b, h_kv * OPT.GROUP, OPT.GROUP, tiles, first_query, OPT)


@gluon.jit
def consume(grad_key, grad_value, bias, memory, sizes, scales, WARP_GROUP: gl.constexpr, OPT: gl.constexpr):
    """Compute dK and dV of one group's 64 keys, turn after turn, and store dS of each step for the third group."""
    D: gl.constexpr = OPT.D
    BLOCK: gl.constexpr = OPT.BLOCK
    ROWS: gl.constexpr = OPT.ROWS
    STAGES: gl.constexpr = OPT.STAGES
    tile_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    keys_layout: gl.constexpr = gl.DotOperandLayout(0, tile_layout, 2)
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    result_k, result_v = memory.results.index(2 * WARP_GROUP), memory.results.index(2 * WARP_GROUP + 1)
    offs_m = gl.arange(0, BLOCK, gl.SliceLayout(0, tile_layout))
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, tile_layout)
    count = 0  # tiles so far
    for turn in range(sizes.turns):
        b, h_kv, start_n, first_query, tiles, edges = key_tile(turn, sizes, OPT)
        start = start_n + WARP_GROUP * ROWS
        j = start + gl.arange(0, ROWS, gl.SliceLayout(1, tile_layout))
        acc_k = gl.zeros([ROWS, D], gl.float32, out_layout)
        acc_v = gl.zeros([ROWS, D], gl.float32, out_layout)
        keys, parity = keys_slot(turn, WARP_GROUP)
        mbarrier.wait(memory.keys_full.index(keys), parity)
        k = memory.k_tiles.index(keys).reshape([ROWS, D]).load(keys_layout)
        v = memory.v_tiles.index(keys).reshape([ROWS, D]).load(keys_layout)
        mbarrier.arrive(memory.keys_empty.index(keys))
        steps = OPT.GROUP * tiles
        slot = count % STAGES
        mbarrier.wait(memory.full.index(slot), count // STAGES & 1, pred=steps > 0)
        # [ROWS, D] @ [D, BLOCK] -> [ROWS, BLOCK], (keys, queries)
        logits = warpgroup_mma(k, transposed(memory.first, slot, BLOCK, D), zeros, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        for step in range(steps):
            slot, buffer = count % STAGES, count % 2
            dp = warpgroup_mma(v, transposed(memory.second, slot, BLOCK, D), zeros, use_acc=False, is_async=True)
            tile = step % gl.maximum(tiles, 1)
            h = h_kv * OPT.GROUP + step // gl.maximum(tiles, 1)
            i = sizes.query_offset + first_query + tile * BLOCK + offs_m
            z_bias = load_bias(bias, scales, b, h, OPT)
            # rows are keys and columns queries here; so -j and -i are compared
            p = weights(logits, scales, z_bias, -j, -i, tile < edges, OPT)
            operand = gl.convert_layout(p.to(grad_value.dtype), operand_layout)
            # [ROWS, BLOCK] @ [BLOCK, D] -> [ROWS, D]
            dv = warpgroup_mma(operand, memory.second.index(slot).reshape([BLOCK, D]), acc_v, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = logit_gradient(p, p, dp, scales.unit, scales.lower, OPT.SHIFTED).to(grad_key.dtype)
            operand_ds = gl.convert_layout(ds, operand_layout)
            dk = warpgroup_mma(operand_ds, memory.first.index(slot).reshape([BLOCK, D]), acc_k, is_async=True)
            # S of the next step; in the last one it is of any tile, and not used
            following = (count + 1) % STAGES
            mbarrier.wait(memory.full.index(following), (count + 1) // STAGES & 1, pred=step + 1 < steps)
            new = warpgroup_mma(k, transposed(memory.first, following, BLOCK, D), zeros, use_acc=False, is_async=True)
            mbarrier.wait(memory.ds_empty.index(buffer), count // 2 & 1 ^ 1)
            memory.ds.index(buffer).slice(WARP_GROUP * ROWS, ROWS, 0).store(ds)
            fence_async_shared()
            mbarrier.arrive(memory.ds_full.index(buffer))
            acc_v, acc_k = warpgroup_mma_wait(1, deps=[dv, dk])
            mbarrier.arrive(memory.empty.index(slot))
            logits = warpgroup_mma_wait(0, deps=[new])
            count += 1
        tma.store_wait(0)  # the results of the last turn have been read
        result_k.reshape([ROWS, D]).store((acc_k * scales.logit).to(grad_key.dtype))
        result_v.reshape([ROWS, D]).store((acc_v * scales.out).to(grad_value.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(grad_key, [b, h_kv, start, 0], result_k)
        tma.async_copy_shared_to_global(grad_value, [b, h_kv, start, 0], result_v)
    tma.store_wait(0)


@gluon.jit
def add_queries(grad_query, memory, sizes, OPT: gl.constexpr):
    """Add dS K of each step, over the keys of both groups, to dQ."""
    D: gl.constexpr = OPT.D
    BLOCK: gl.constexpr = OPT.BLOCK
    ROWS: gl.constexpr = OPT.ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    zeros = gl.zeros([BLOCK, D], gl.float32, layout)
    count = 0  # tiles so far
    for turn in range(sizes.turns):
        b, h_kv, _start, first_query, tiles, _edges = key_tile(turn, sizes, OPT)
        for step in range(OPT.GROUP * tiles):
            buffer = count % 2
            mbarrier.wait(memory.ds_full.index(buffer), count // 2 & 1)  # by then the keys are there, too
            dq = zeros
            for g in gl.static_range(2):
                slot, _parity = keys_slot(turn, g)
                ds = memory.ds.index(buffer).slice(g * ROWS, ROWS, 0).permute([1, 0])
                # [BLOCK, ROWS] @ [ROWS, D] -> [BLOCK, D]
                dq = warpgroup_mma(ds, memory.k_tiles.index(slot).reshape([ROWS, D]), dq, use_acc=g > 0, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(memory.ds_empty.index(buffer))
            tile = memory.dq.index(buffer)
            tma.store_wait(1)  # the tile before the last has been read
            tile.reshape([BLOCK, D]).store(dq)
            fence_async_shared()
            add_by_tma(grad_query, [b, h_kv * OPT.GROUP + step // tiles, first_query + step % tiles * BLOCK, 0], tile)
            count += 1
        for g in gl.static_range(2):
            slot, _parity = keys_slot(turn, g)
            mbarrier.arrive(memory.keys_empty.index(slot))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["bias_b", "bias_h", "len_q", "len_k", "batch_heads", "section", "query_offset"])
def hopper_bwd_fused_kernel(
    query, key, value, grad_out, grad_query, grad_key, grad_value, bias, bias_b, bias_h, len_q, len_k, heads,
    batch_heads, section, query_offset, scales, OPT: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of tiles of 128 keys, and add their part of dQ, without its factor; arguments: common.py."""
    keys_shape: gl.constexpr = [4, 1, 1, OPT.ROWS, OPT.D]
    ring_shape: gl.constexpr = [OPT.STAGES, 1, 1, OPT.BLOCK, OPT.D]
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    memory = FusedMemory(
        gl.allocate_shared_memory(query.dtype, keys_shape, key.layout),
        gl.allocate_shared_memory(query.dtype, keys_shape, value.layout),
        gl.allocate_shared_memory(query.dtype, ring_shape, query.layout),
        gl.allocate_shared_memory(query.dtype, ring_shape, grad_out.layout),
        gl.allocate_shared_memory(query.dtype, [2, 2 * OPT.ROWS, OPT.BLOCK], ds_layout),
        gl.allocate_shared_memory(gl.float32, [2, 1, 1, OPT.BLOCK, OPT.D], grad_query.layout),
        gl.allocate_shared_memory(query.dtype, keys_shape, grad_key.layout),
        barriers(4, 1),
        barriers(4, 2),
        barriers(OPT.STAGES, 1),
        barriers(OPT.STAGES, 2),
        barriers(2, 2),
        barriers(2, 1),
    )
    fence_async_shared()
    turns = num_turns(gl.cdiv(len_k, OPT.WARP_GROUPS * OPT.ROWS) * batch_heads, OPT)
    sizes = Sizes(len_q, len_k, heads, query_offset, batch_heads, section, turns)
    bias = HeadBias(bias, bias_b, bias_h)
    gl.warp_specialize(
        [
            (consume, (grad_key, grad_value, bias, memory, sizes, scales, gl.constexpr(0), OPT)),
            (consume, (grad_key, grad_value, bias, memory, sizes, scales, gl.constexpr(1), OPT)),
            (add_queries, (grad_query, memory, sizes, OPT)),
            (produce, (query, key, value, grad_out, memory, sizes, OPT)),
        ],
        [4, 4, 1],
        [208, 72, 24],  # registers of a thread
    )
