"""The forward kernel for Hopper in Gluon, Triton's lower level: TMA, wgmma and mbarriers, each warp with a role.

A producer warp lets the copy engine bring tiles of K and V into rings in shared memory. Two groups of four warps, 64
queries each, take them from there. A group issues S of the next tile *before* σ of this one, and leaves P V running
while it computes the next weights: sigmoid has nothing that ties one tile to another, so all that a group waits for are
tensor cores that are busy with its own products. While one group computes weights, the other's products run.

It serves the plain problem: 16 bits, D = Dv of 64 or 128, b a number, full or causal. The arguments are those of
``forward_kernel`` but for the tensors, which come as descriptors of (B, H, N, D) for the copy engine: rows beyond the
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

ROWS = 64  # queries of a group of four warps: what a wgmma has


@gluon.jit
def reciprocal(d):
    """``activation.reciprocal``, number for number."""
    guess = (0x7EF311C7 - d.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    t = d * guess
    return guess * (3.003833286708749 + t * (-3.005749435911007 + t * 1.001916149831417))


@gluon.jit
def weights(products, z_scale, z_bias, unit, i, j, edge, SIGMOID: gl.constexpr):
    """P, or P · 2^shift (in z_bias and unit), from Q Kᵀ; 0 where key j lies after place i, if this is an edge.

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
        d = unit + gl.exp2(gl.minimum(z, 60.0, propagate_nan=tl.PropagateNan.ALL))
        a, b = gl.split(gl.reshape(d, (d.shape[0], d.shape[1] // 2, 2)))
        r = reciprocal(a * b)
        p = gl.convert_layout(gl.reshape(gl.join(r * b, r * a), d.shape), products.type.layout, assert_trivial=True)
    else:
        gl.static_assert(SIGMOID == "accurate")
        p = reciprocal(unit + gl.exp2(gl.minimum(z, 120.0, propagate_nan=tl.PropagateNan.ALL)))
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
def produce(
    key, value, keys_ring, values_ring, k_full, k_empty, v_full, v_empty, b, h_kv, tiles, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Bring tile after tile of K and V, each into its ring as soon as both groups have left the place."""
    for tile in range(tiles):
        stage = tile % STAGES
        turn = tile // STAGES & 1
        mbarrier.wait(k_empty.index(stage), turn ^ 1)
        mbarrier.expect(k_full.index(stage), BYTES)
        tma.async_copy_global_to_shared(key, [b, h_kv, tile * BLOCK_N, 0], k_full.index(stage), keys_ring.index(stage))
        mbarrier.wait(v_empty.index(stage), turn ^ 1)
        mbarrier.expect(v_full.index(stage), BYTES)
        tma.async_copy_global_to_shared(
            value, [b, h_kv, tile * BLOCK_N, 0], v_full.index(stage), values_ring.index(stage)
        )


@gluon.jit
def consume(
    out, shared, place, scalars, GROUP_OF_WARPS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SIGMOID: gl.constexpr, ROWS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One group's 64 queries against all their keys."""
    queries, keys_ring, values_ring, q_full, k_full, k_empty, v_full, v_empty = shared
    b, h, row_start, first_row, tiles, full_tiles = place
    z_scale, z_bias, unit, out_scale = scalars
    logits_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    mine = queries.index(GROUP_OF_WARPS)
    q = mine.reshape([ROWS, D])
    start = row_start + GROUP_OF_WARPS * ROWS
    i = first_row + start + gl.arange(0, ROWS, gl.SliceLayout(1, logits_layout))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, logits_layout))
    empty = gl.zeros([ROWS, BLOCK_N], gl.float32, logits_layout)
    acc = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, out_layout))

    mbarrier.wait(q_full.index(GROUP_OF_WARPS), 0)
    mbarrier.wait(k_full.index(0), 0)
    products = warpgroup_mma(q, keys_of(keys_ring, 0, D, BLOCK_N), empty, use_acc=False, is_async=True)
    products = warpgroup_mma_wait(0, deps=[products])
    mbarrier.arrive(k_empty.index(0))
    if AHEAD:
        after = gl.minimum(1, tiles - 1)
        mbarrier.wait(k_full.index(after), 0)
        following = warpgroup_mma(q, keys_of(keys_ring, after, D, BLOCK_N), empty, use_acc=False, is_async=True)
    p = weights(products, z_scale, z_bias, unit, i, columns, full_tiles < 1, SIGMOID)
    operand = gl.convert_layout(p.to(out.dtype), weights_layout)
    if AHEAD:
        products = warpgroup_mma_wait(0, deps=[following])
        mbarrier.arrive(k_empty.index(after), pred=tiles > 1)
    for tile in range(1, tiles):
        # what is issued here runs while this group computes the weights below
        after = tile
        if AHEAD:
            after = gl.minimum(tile + 1, tiles - 1)  # the last products are made twice, and not used the second time
        mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1)
        k = keys_of(keys_ring, after % STAGES, D, BLOCK_N)
        following = warpgroup_mma(q, k, empty, use_acc=False, is_async=True)
        stage = (tile - 1) % STAGES
        mbarrier.wait(v_full.index(stage), (tile - 1) // STAGES & 1)
        acc = warpgroup_mma(operand, values_ring.index(stage).reshape([BLOCK_N, D]), acc, is_async=True)
        if not AHEAD:
            products = warpgroup_mma_wait(1, deps=[following])
            mbarrier.arrive(k_empty.index(after % STAGES))
        p = weights(
            products, z_scale, z_bias, unit, i, tile * BLOCK_N + columns, tile >= full_tiles, SIGMOID
        )  # fmt: skip
        following_operand = gl.convert_layout(p.to(out.dtype), weights_layout)
        if AHEAD:
            products, acc = warpgroup_mma_wait(0, deps=[following, acc])
            mbarrier.arrive(k_empty.index(after % STAGES), pred=tile + 1 < tiles)
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        acc = warpgroup_mma_init(acc)
        mbarrier.arrive(v_empty.index(stage))
        operand = following_operand
    stage = (tiles - 1) % STAGES
    mbarrier.wait(v_full.index(stage), (tiles - 1) // STAGES & 1)
    acc = warpgroup_mma(operand, values_ring.index(stage).reshape([BLOCK_N, D]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    # the queries' place is free now: it takes the output, which the copy engine writes from there
    q.store((acc * out_scale).to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [b, h, start, 0], mine)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "keys", "first_row"])
def hopper_forward_kernel(
    query, key, value, out, n, keys, heads, first_row, z_scale, z_bias, unit, out_scale,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    SIGMOID: gl.constexpr, ROWS: gl.constexpr, AHEAD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """128 queries of one head."""
    BLOCK_M: gl.constexpr = 2 * ROWS
    dtype: gl.constexpr = query.dtype
    tiles_of_rows = gl.cdiv(n, BLOCK_M)
    program = gl.program_id(0)
    head = program // tiles_of_rows
    row_tile = program % tiles_of_rows
    if CAUSAL:  # the last queries have the most to do: they go first
        row_tile = tiles_of_rows - 1 - row_tile
    row_start = row_tile * BLOCK_M
    b, h = head // heads, head % heads
    tiles = gl.cdiv(keys, BLOCK_N)
    full_tiles = tiles + first_row  # all, but the compiler does not know that first_row is 0 or more (``weights``)
    if CAUSAL:
        last = first_row + gl.minimum(row_start + BLOCK_M, n)
        tiles = gl.maximum(gl.cdiv(gl.minimum(keys, last), BLOCK_N), 1)
        full_tiles = (first_row + row_start + 1) // BLOCK_N  # seen whole by every query

    queries = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], query.layout)
    keys_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], key.layout)
    values_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], value.layout)
    q_full = barriers(2, 1)
    k_full, v_full = barriers(STAGES, 1), barriers(STAGES, 1)
    k_empty, v_empty = barriers(STAGES, 2), barriers(STAGES, 2)
    fence_async_shared()
    for g in gl.static_range(2):
        mbarrier.expect(q_full.index(g), ROWS * D * 2)
        tma.async_copy_global_to_shared(query, [b, h, row_start + g * ROWS, 0], q_full.index(g), queries.index(g))
    shared = (queries, keys_ring, values_ring, q_full, k_full, k_empty, v_full, v_empty)
    place = (b, h, row_start, first_row, tiles, full_tiles)
    scalars = (z_scale, z_bias, unit, out_scale)
    bytes_of_tile: gl.constexpr = BLOCK_N * D * 2
    gl.warp_specialize(
        [
            (consume, (out, shared, place, scalars, gl.constexpr(0), D, BLOCK_N, STAGES, SIGMOID, ROWS, AHEAD)),
            (consume, (out, shared, place, scalars, gl.constexpr(1), D, BLOCK_N, STAGES, SIGMOID, ROWS, AHEAD)),
            (
                produce,
                (
                    key, value, keys_ring, values_ring, k_full, k_empty, v_full, v_empty, b, h // GROUP, tiles,
                    BLOCK_N, STAGES, bytes_of_tile,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, 24],
    )  # fmt: skip
