"""The forward kernel for Hopper in Gluon, Triton's lower level: TMA, wgmma and mbarriers, each warp with a role.

A producer warp lets the copy engine bring tiles of K and V into rings in shared memory. Two groups of four warps, 64
queries each, take them from there. A group issues S of the next tile *before* σ of this one (PREFETCH), and leaves P V
running while it computes the next weights: sigmoid has nothing that ties one tile to another, so all that a group waits
for are tensor cores that are busy with its own products. While one group computes weights, the other's products run. A
program may have many tiles of queries: the next ones, and their keys, are on their way while an output is written.

It serves the plain problem: 16 bits, D = Dv of 64 or 128, b a number, full or causal. The arguments are those of
``fwd_kernel`` but for the tensors, which come as descriptors of (B, H, N, D) for the copy engine: rows beyond the
last are 0 when read and left out when written. docs/speed.md has the model behind it. It has never run on a GPU.
"""

from __future__ import annotations

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


@gluon.jit
def reciprocal(d):
    """``activation.reciprocal``, number for number."""
    guess = (0x7EF311C7 - d.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    t = d * guess
    return guess * (3.003833286708749 + t * (-3.005749435911007 + t * 1.001916149831417))


@gluon.jit
def reciprocal_of_some(d):
    """``activation.reciprocal_of_some``, number for number."""
    ROWS: gl.constexpr = d.shape[0]
    COLUMNS: gl.constexpr = d.shape[1]
    fours = gl.permute(gl.reshape(d, (ROWS, COLUMNS // 16, 2, 2, 4)), (0, 1, 4, 2, 3))
    x, y = gl.split(fours)
    u, v = gl.split(x)
    u = special_reciprocal(u)
    r = gl.join(gl.join(u, reciprocal(v)), reciprocal(y))
    r = gl.reshape(gl.permute(r, (0, 1, 3, 4, 2)), (ROWS, COLUMNS))
    return gl.convert_layout(r, d.type.layout, assert_trivial=True)


@gluon.jit
def special_reciprocal(d):
    """1/d by the special-function unit."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def weights(products, z_scale, z_bias, unit, i, j, edge, SIGMOID: gl.constexpr, SHIFTED: gl.constexpr):
    """P, or with SHIFTED P · 2^shift (unit is 2^-shift), from Q Kᵀ; at an edge 0 where key j lies after place i.

    The branch is there without a causal mask too, where it is never taken: the assembler moves nothing over it. Without
    it, half of σ ended up behind the wait for the products that it should overlap with.
    """
    z = products * z_scale + z_bias
    if SIGMOID == "fast":
        tanh = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [z * -0.34657359027997264], dtype=gl.float32, is_pure=True, pack=1
        )
        p = 0.5 + 0.5 * tanh
    elif SIGMOID == "paired":
        # neighbours, which a thread holds both of, share one reciprocal
        e = gl.exp2(gl.minimum(z, 60.0, propagate_nan=tl.PropagateNan.ALL))
        e, f = gl.split(gl.reshape(e, (e.shape[0], e.shape[1] // 2, 2)))
        d = 1.0 + e
        r = reciprocal_of_some(d * f + d)
        if SHIFTED:
            r = r * (1.0 / unit)
        p = gl.reshape(gl.join(r * f + r, r * d), z.shape)
        p = gl.convert_layout(p, products.type.layout, assert_trivial=True)
    else:
        gl.static_assert(SIGMOID == "accurate")
        p = reciprocal(1.0 + gl.exp2(gl.minimum(z, 120.0, propagate_nan=tl.PropagateNan.ALL)))
        if SHIFTED:
            p = p * (1.0 / unit)
    if edge:
        p = gl.where(j[None, :] <= i[:, None], p, 0.0)
    return p


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """New barriers that turn after so many arrivals; a fence must follow before anyone uses them."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def keys_of(ring, stage, D: gl.constexpr, BLOCK_N: gl.constexpr):
    """A tile of K as the product wants it, (D, BLOCK_N)."""
    return ring.index(stage).reshape([BLOCK_N, D]).permute([1, 0])


@gluon.jit
def item_of(turn, CAUSAL: gl.constexpr):
    """The number of what a program does in a turn.

    A round of all programs takes things in order, and where they differ the next round backwards: who had much has
    little then.
    """
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if CAUSAL:
        if turn % 2 == 1:
            place = programs - 1 - place
    return turn * programs + place


@gluon.jit
def work_of(turn, n, keys, heads, query_offset, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """What a program does in a turn: sample, head, first query, tiles of keys, and how many of them are seen whole.

    Tiles of queries are numbered head by head, so that programs which run together share keys, the longest of a head
    first.
    """
    tiles_of_rows = gl.cdiv(n, BLOCK_M)
    item = item_of(turn, CAUSAL)
    head = item // tiles_of_rows
    row_tile = item % tiles_of_rows
    if CAUSAL:
        row_tile = tiles_of_rows - 1 - row_tile
    row_start = row_tile * BLOCK_M
    tiles = gl.cdiv(keys, BLOCK_N)
    full_tiles = (
        tiles + query_offset
    )  # all, but the compiler does not know that query_offset is 0 or more (``weights``)
    if CAUSAL:
        last = query_offset + gl.minimum(row_start + BLOCK_M, n)
        tiles = gl.maximum(gl.cdiv(gl.minimum(keys, last), BLOCK_N), 1)
        full_tiles = (query_offset + row_start + 1) // BLOCK_N  # seen whole by every query
    return head // heads, head % heads, row_start, tiles, full_tiles


@gluon.jit
def turns_of(items, CAUSAL: gl.constexpr):
    """How many turns this program has, of so many things to do."""
    programs = gl.num_programs(0)
    rounds = items // programs
    place = gl.program_id(0)
    if CAUSAL:
        if rounds % 2 == 1:
            place = programs - 1 - place
    if place < items % programs:
        rounds += 1
    return rounds


@gluon.jit
def produce(
    query, key, value, shared, problem, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Bring queries, then tile after tile of K and V, each into its ring as soon as both groups have left the place."""
    queries, _staged, keys_ring, values_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared
    n, keys, heads, query_offset, turns = problem
    count = 0  # tiles so far
    for turn in range(turns):
        b, h, row_start, tiles, _full = work_of(turn, n, keys, heads, query_offset, CAUSAL, 2 * ROWS, BLOCK_N)
        for g in gl.static_range(2):
            mbarrier.wait(q_empty.index(g), turn & 1 ^ 1)
            mbarrier.expect(q_full.index(g), ROWS * D * 2)
            tma.async_copy_global_to_shared(query, [b, h, row_start + g * ROWS, 0], q_full.index(g), queries.index(g))
        for tile in range(tiles):
            stage = count % STAGES
            phase = count // STAGES & 1 ^ 1
            place = [b, h // GROUP, tile * BLOCK_N, 0]
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
            tma.async_copy_global_to_shared(key, place, k_full.index(stage), keys_ring.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), BLOCK_N * D * 2)
            tma.async_copy_global_to_shared(value, place, v_full.index(stage), values_ring.index(stage))
            count += 1


@gluon.jit
def consume(
    out, shared, problem, scalars, GROUP_OF_WARPS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, SIGMOID: gl.constexpr, SHIFTED: gl.constexpr, ROWS: gl.constexpr,
    PREFETCH: gl.constexpr,
):  # fmt: skip
    """One group's 64 queries against all their keys, turn after turn."""
    queries, staged, keys_ring, values_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared
    n, keys, heads, query_offset, turns = problem
    z_scale, z_bias, unit, out_scale = scalars
    logits_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    q = queries.index(GROUP_OF_WARPS).reshape([ROWS, D])
    mine = staged.index(GROUP_OF_WARPS)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, logits_layout))
    empty = gl.zeros([ROWS, BLOCK_N], gl.float32, logits_layout)
    count = 0  # tiles of earlier turns
    for turn in range(turns):
        b, h, row_start, tiles, full_tiles = work_of(turn, n, keys, heads, query_offset, CAUSAL, 2 * ROWS, BLOCK_N)
        start = row_start + GROUP_OF_WARPS * ROWS
        i = query_offset + start + gl.arange(0, ROWS, gl.SliceLayout(1, logits_layout))
        acc = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, out_layout))

        mbarrier.wait(q_full.index(GROUP_OF_WARPS), turn & 1)
        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), count // STAGES & 1)
        products = warpgroup_mma(q, keys_of(keys_ring, stage, D, BLOCK_N), empty, use_acc=False, is_async=True)
        products = warpgroup_mma_wait(0, deps=[products])
        if PREFETCH:
            # the last products are made twice, and not used the second time: only then is the place of K given back
            mbarrier.arrive(k_empty.index(stage), pred=tiles > 1)
            after = count + gl.minimum(1, tiles - 1)
            stage = after % STAGES
            mbarrier.wait(k_full.index(stage), after // STAGES & 1)
            following = warpgroup_mma(q, keys_of(keys_ring, stage, D, BLOCK_N), empty, use_acc=False, is_async=True)
        else:
            mbarrier.arrive(k_empty.index(stage))
        p = weights(products, z_scale, z_bias, unit, i, columns, full_tiles < 1, SIGMOID, SHIFTED)
        operand = gl.convert_layout(p.to(out.dtype), weights_layout)
        if PREFETCH:
            products = warpgroup_mma_wait(0, deps=[following])
            mbarrier.arrive(k_empty.index(stage), pred=tiles != 2)
        for tile in range(1, tiles):
            # what is issued here runs while this group computes the weights below
            after = count + tile
            if PREFETCH:
                after = count + gl.minimum(tile + 1, tiles - 1)
            k_stage = after % STAGES
            mbarrier.wait(k_full.index(k_stage), after // STAGES & 1)
            k = keys_of(keys_ring, k_stage, D, BLOCK_N)
            following = warpgroup_mma(q, k, empty, use_acc=False, is_async=True)
            v_stage = (count + tile - 1) % STAGES
            mbarrier.wait(v_full.index(v_stage), (count + tile - 1) // STAGES & 1)
            acc = warpgroup_mma(operand, values_ring.index(v_stage).reshape([BLOCK_N, D]), acc, is_async=True)
            if not PREFETCH:
                products = warpgroup_mma_wait(1, deps=[following])
                mbarrier.arrive(k_empty.index(k_stage))
            p = weights(
                products, z_scale, z_bias, unit, i, tile * BLOCK_N + columns, tile >= full_tiles, SIGMOID, SHIFTED
            )  # fmt: skip
            following_operand = gl.convert_layout(p.to(out.dtype), weights_layout)
            if PREFETCH:
                products, acc = warpgroup_mma_wait(0, deps=[following, acc])
                mbarrier.arrive(k_empty.index(k_stage), pred=tile + 2 != tiles)
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            acc = warpgroup_mma_init(acc)
            mbarrier.arrive(v_empty.index(v_stage))
            operand = following_operand
        mbarrier.arrive(q_empty.index(GROUP_OF_WARPS))
        count += tiles
        v_stage = (count - 1) % STAGES
        mbarrier.wait(v_full.index(v_stage), (count - 1) // STAGES & 1)
        acc = warpgroup_mma(operand, values_ring.index(v_stage).reshape([BLOCK_N, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_stage))
        tma.store_wait(0)  # what was written last time has left its place
        mine.reshape([ROWS, D]).store((acc * out_scale).to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [b, h, start, 0], mine)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "keys", "batch_heads", "query_offset"])
def hopper_fwd_kernel(
    query, key, value, out, n, keys, heads, batch_heads, query_offset, z_scale, z_bias, unit, out_scale,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    SIGMOID: gl.constexpr, SHIFTED: gl.constexpr, ROWS: gl.constexpr, PREFETCH: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 queries of one head, as many as a program gets of all."""
    dtype: gl.constexpr = query.dtype
    queries = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], query.layout)
    staged = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], query.layout)
    keys_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], key.layout)
    values_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], value.layout)
    q_full, q_empty = barriers(2, 1), barriers(2, 1)
    k_full, v_full = barriers(STAGES, 1), barriers(STAGES, 1)
    k_empty, v_empty = barriers(STAGES, 2), barriers(STAGES, 2)
    fence_async_shared()
    shared = (queries, staged, keys_ring, values_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    problem = (n, keys, heads, query_offset, turns_of(gl.cdiv(n, 2 * ROWS) * batch_heads, CAUSAL))
    scalars = (z_scale, z_bias, unit, out_scale)
    gl.warp_specialize(
        [
            (consume, (out, shared, problem, scalars, gl.constexpr(0), D, BLOCK_N, STAGES, CAUSAL, SIGMOID, SHIFTED,
                       ROWS, PREFETCH)),
            (consume, (out, shared, problem, scalars, gl.constexpr(1), D, BLOCK_N, STAGES, CAUSAL, SIGMOID, SHIFTED,
                       ROWS, PREFETCH)),
            (produce, (query, key, value, shared, problem, GROUP, D, BLOCK_N, STAGES, CAUSAL, ROWS)),
        ],
        [4, 4],
        [REGISTERS, 24],
    )  # fmt: skip
