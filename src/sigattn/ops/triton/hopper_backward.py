"""The backward kernels for Hopper in Gluon: what ``backward.py`` does, with the roles of ``hopper.py``.

    dV = Pᵀ dO     dP = dO Vᵀ     dS = P ∘ (1 − P) ∘ dP     dQ = scale · dS K     dK = scale · dSᵀ Q

``hopper_keys_kernel``: each group of four warps has 64 keys and walks the queries; tiles stand as (keys, queries), so
P and dS are in registers as the second products want them, and nothing is transposed. ``hopper_queries_kernel``: each
has 64 queries and walks the keys. Seven products instead of five, added in a fixed order. σ runs while dP's product
does, and dS's while dV's does; what is left open is filled by the other group. Never run on a GPU.
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

from sigattn.ops.triton.hopper import barriers, weights


@gluon.jit
def produce_pairs(
    first, second, ring, other_ring, full, empty, b, h, group, tiles, start, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """Bring tiles of two tensors, rows from ``start`` on, of ``group`` heads one after another, a ring each."""
    for step in range(group * tiles):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(stage), 2 * BYTES)
        place = [b, h + step // tiles, start + step % tiles * BLOCK, 0]
        tma.async_copy_global_to_shared(first, place, full.index(stage), ring.index(stage))
        tma.async_copy_global_to_shared(second, place, full.index(stage), other_ring.index(stage))


@gluon.jit
def own_pairs(first, second, b, h, start, ROWS: gl.constexpr, D: gl.constexpr):
    """What the groups of warps keep of two tensors, ROWS rows each: its place, on the way, and when it is there."""
    dtype: gl.constexpr = first.dtype
    own = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], first.layout)
    other = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], second.layout)
    full = barriers(2, 1)
    fence_async_shared()
    for g in gl.static_range(2):
        place = [b, h, start + g * ROWS, 0]
        mbarrier.expect(full.index(g), 2 * ROWS * D * 2)
        tma.async_copy_global_to_shared(first, place, full.index(g), own.index(g))
        tma.async_copy_global_to_shared(second, place, full.index(g), other.index(g))
    return own, other, full


@gluon.jit
def rings(first, second, STAGES: gl.constexpr, BLOCK: gl.constexpr, D: gl.constexpr):
    """Places for the tiles of two tensors that are walked, and barriers: filled by a copy, left by both groups."""
    dtype: gl.constexpr = first.dtype
    ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, D], first.layout)
    other = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, D], second.layout)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    return ring, other, full, empty


@gluon.jit
def queries_of(column_start, n, first_row, CAUSAL: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr):
    """Of two groups' keys: the first query to visit, how many tiles, and how many of them the mask crosses."""
    first_query = 0
    edges = gl.minimum(first_row, 0)  # 0, but the compiler does not know that
    if CAUSAL:
        first_query = gl.minimum(gl.maximum(column_start - first_row, 0) // BLOCK * BLOCK, n)
        # tiles of queries that do not all see the last of these keys
        edges = gl.maximum(gl.cdiv(column_start + 2 * ROWS - 1 - first_row - first_query, BLOCK), 0)
    return first_query, gl.cdiv(n - first_query, BLOCK), edges


@gluon.jit
def logit_gradient(p, dp, unit, lower, SHIFTED: gl.constexpr):
    """DS from P and dP; SHIFTED: in float16, with powers of two (``gradient_shift`` in tile.py)."""
    if SHIFTED:
        ds = (p - p * p * unit) * dp * lower
    else:
        ds = (p - p * p) * dp
    return ds


@gluon.jit
def transposed(ring, stage, ROWS: gl.constexpr, D: gl.constexpr):
    """A tile as the second factor of a product over features, (D, ROWS)."""
    return ring.index(stage).reshape([ROWS, D]).permute([1, 0])


@gluon.jit
def consume_queries(
    grad_key, grad_value, shared, place, scalars, GROUP_OF_WARPS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, SIGMOID: gl.constexpr, SHIFTED: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The gradients dK and dV of one group's 64 keys."""
    keys, values, ring, grads_ring, own_full, full, empty = shared
    b, h_kv, column_start, first_row, first_query, steps, tiles, edges = place
    z_scale, z_bias, unit, lower, out_scale, logit_scale = scalars
    tile_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    my_keys, my_values = keys.index(GROUP_OF_WARPS), values.index(GROUP_OF_WARPS)
    k, v = my_keys.reshape([ROWS, D]), my_values.reshape([ROWS, D])
    start = column_start + GROUP_OF_WARPS * ROWS
    j = start + gl.arange(0, ROWS, gl.SliceLayout(1, tile_layout))
    rows = gl.arange(0, BLOCK, gl.SliceLayout(0, tile_layout))
    empty_tile = gl.zeros([ROWS, BLOCK], gl.float32, tile_layout)
    acc_k = gl.zeros([ROWS, D], gl.float32, out_layout)
    acc_v = gl.zeros([ROWS, D], gl.float32, out_layout)
    mbarrier.wait(own_full.index(GROUP_OF_WARPS), 0)
    for step in range(steps):
        stage = step % STAGES
        tile = step % tiles
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        products = warpgroup_mma(k, transposed(ring, stage, BLOCK, D), empty_tile, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, transposed(grads_ring, stage, BLOCK, D), empty_tile, use_acc=False, is_async=True)
        products = warpgroup_mma_wait(1, deps=[products])
        i = first_row + first_query + tile * BLOCK + rows
        # tiles stand transposed here: rows are keys, columns queries; so -j and -i are compared
        p = weights(products, z_scale, z_bias, unit, -j, -i, tile < edges, SIGMOID, SHIFTED)  # (keys, queries)
        operand = gl.convert_layout(p.to(grad_value.dtype), operand_layout)
        grads = grads_ring.index(stage).reshape([BLOCK, D])
        dv = warpgroup_mma(operand, grads, acc_v, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = logit_gradient(p, dp, unit, lower, SHIFTED)
        operand_ds = gl.convert_layout(ds.to(grad_key.dtype), operand_layout)
        dk = warpgroup_mma(operand_ds, ring.index(stage).reshape([BLOCK, D]), acc_k, is_async=True)
        acc_v, acc_k = warpgroup_mma_wait(0, deps=[dv, dk])
        mbarrier.arrive(empty.index(stage))
    # the places of the keys and values are free now: they take the gradients
    k.store((acc_k * logit_scale).to(grad_key.dtype))
    v.store((acc_v * out_scale).to(grad_value.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(grad_key, [b, h_kv, start, 0], my_keys)
    tma.async_copy_shared_to_global(grad_value, [b, h_kv, start, 0], my_values)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "keys", "first_row"])
def hopper_keys_kernel(
    query, key, value, grad_out, grad_key, grad_value, n, keys, heads, first_row, z_scale, z_bias, unit, lower,
    out_scale, logit_scale,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    SIGMOID: gl.constexpr, SHIFTED: gl.constexpr, ROWS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """The gradients dK and dV of 128 keys of one key head."""
    own_tiles = gl.cdiv(keys, 2 * ROWS)
    program = gl.program_id(0)
    column_start = program % own_tiles * 2 * ROWS  # under a causal mask the first keys have the most to do
    kv_heads = heads // GROUP
    b, h_kv = program // own_tiles // kv_heads, program // own_tiles % kv_heads
    first_query, tiles, edges = queries_of(column_start, n, first_row, CAUSAL, BLOCK, ROWS)
    own_keys, own_values, own_full = own_pairs(key, value, b, h_kv, column_start, ROWS, D)
    ring, grads_ring, full, empty = rings(query, grad_out, STAGES, BLOCK, D)
    shared = (own_keys, own_values, ring, grads_ring, own_full, full, empty)
    where = (b, h_kv, column_start, first_row, first_query, GROUP * tiles, gl.maximum(tiles, 1), edges)
    scalars = (z_scale, z_bias, unit, lower, out_scale, logit_scale)
    bytes_of_tile: gl.constexpr = BLOCK * D * 2
    gl.warp_specialize(
        [
            (consume_queries, (grad_key, grad_value, shared, where, scalars, gl.constexpr(0), D, BLOCK, STAGES,
                               SIGMOID, SHIFTED, ROWS)),
            (consume_queries, (grad_key, grad_value, shared, where, scalars, gl.constexpr(1), D, BLOCK, STAGES,
                               SIGMOID, SHIFTED, ROWS)),
            (produce_pairs, (query, grad_out, ring, grads_ring, full, empty, b, h_kv * GROUP, GROUP, tiles, first_query,
                             BLOCK, STAGES, bytes_of_tile)),
        ],
        [4, 4],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def consume_keys(
    grad_query, shared, place, scalars, GROUP_OF_WARPS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, SIGMOID: gl.constexpr, SHIFTED: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The gradient dQ of one group's 64 queries."""
    queries, grads, ring, values_ring, own_full, full, empty = shared
    b, h, row_start, first_row, tiles, full_tiles = place
    z_scale, z_bias, unit, lower, logit_scale = scalars
    tile_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    mine = queries.index(GROUP_OF_WARPS)
    q, do = mine.reshape([ROWS, D]), grads.index(GROUP_OF_WARPS).reshape([ROWS, D])
    start = row_start + GROUP_OF_WARPS * ROWS
    i = first_row + start + gl.arange(0, ROWS, gl.SliceLayout(1, tile_layout))
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, tile_layout))
    empty_tile = gl.zeros([ROWS, BLOCK], gl.float32, tile_layout)
    acc = gl.zeros([ROWS, D], gl.float32, out_layout)
    mbarrier.wait(own_full.index(GROUP_OF_WARPS), 0)
    for tile in range(tiles):
        stage = tile % STAGES
        mbarrier.wait(full.index(stage), tile // STAGES & 1)
        products = warpgroup_mma(q, transposed(ring, stage, BLOCK, D), empty_tile, use_acc=False, is_async=True)
        dp = warpgroup_mma(do, transposed(values_ring, stage, BLOCK, D), empty_tile, use_acc=False, is_async=True)
        products = warpgroup_mma_wait(1, deps=[products])
        p = weights(
            products, z_scale, z_bias, unit, i, tile * BLOCK + columns, tile >= full_tiles, SIGMOID, SHIFTED
        )  # (queries, keys)  # fmt: skip
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = logit_gradient(p, dp, unit, lower, SHIFTED)  # keys beyond the last have v = 0, and so no gradient
        operand = gl.convert_layout(ds.to(grad_query.dtype), operand_layout)
        dq = warpgroup_mma(operand, ring.index(stage).reshape([BLOCK, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(empty.index(stage))
    q.store((acc * logit_scale).to(grad_query.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(grad_query, [b, h, start, 0], mine)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "keys", "first_row"])
def hopper_queries_kernel(
    query, key, value, grad_out, grad_query, n, keys, heads, first_row, z_scale, z_bias, unit, lower, logit_scale,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    SIGMOID: gl.constexpr, SHIFTED: gl.constexpr, ROWS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """The gradient dQ of 128 queries of one head."""
    tiles_of_rows = gl.cdiv(n, 2 * ROWS)
    program = gl.program_id(0)
    head = program // tiles_of_rows
    row_tile = program % tiles_of_rows
    if CAUSAL:  # the last queries have the most to do: they go first
        row_tile = tiles_of_rows - 1 - row_tile
    row_start = row_tile * 2 * ROWS
    b, h = head // heads, head % heads
    tiles = gl.cdiv(keys, BLOCK)
    full_tiles = tiles + first_row  # all, but the compiler does not know that first_row is 0 or more (``weights``)
    if CAUSAL:
        last = first_row + gl.minimum(row_start + 2 * ROWS, n)
        tiles = gl.cdiv(gl.minimum(keys, last), BLOCK)
        full_tiles = (first_row + row_start + 1) // BLOCK
    queries, grads, own_full = own_pairs(query, grad_out, b, h, row_start, ROWS, D)
    ring, values_ring, full, empty = rings(key, value, STAGES, BLOCK, D)
    shared = (queries, grads, ring, values_ring, own_full, full, empty)
    where = (b, h, row_start, first_row, tiles, full_tiles)
    scalars = (z_scale, z_bias, unit, lower, logit_scale)
    bytes_of_tile: gl.constexpr = BLOCK * D * 2
    gl.warp_specialize(
        [
            (consume_keys, (grad_query, shared, where, scalars, gl.constexpr(0), D, BLOCK, STAGES, SIGMOID,
                            SHIFTED, ROWS)),
            (consume_keys, (grad_query, shared, where, scalars, gl.constexpr(1), D, BLOCK, STAGES, SIGMOID,
                            SHIFTED, ROWS)),
            (produce_pairs, (key, value, ring, values_ring, full, empty, b, h // GROUP, 1, tiles, 0, BLOCK, STAGES,
                             bytes_of_tile)),
        ],
        [4, 4],
        [REGISTERS, 24],
    )  # fmt: skip
