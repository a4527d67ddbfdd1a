"""The backward kernels for Hopper in Gluon: what ``backward.py`` does, with the roles of ``hopper.py``.

    dV = Pᵀ dO     dP = dO Vᵀ     dS = P ∘ (1 − P) ∘ dP     dQ = scale · dS K     dK = scale · dSᵀ Q

``hopper_bwd_dkdv_kernel``: each group of four warps has 64 keys and walks the queries; tiles stand as (keys, queries),
so P and dS are in registers as the second products want them, and nothing is transposed. ``hopper_bwd_dq_kernel``: each
has 64 queries and walks the keys. Seven products instead of five, added in a fixed order. σ runs while dP's product
does, and dS's while dV's does; what is left open is filled by the other group. A program may have many tiles: the next
one's operands are on their way while results are written. Never run on a GPU.
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

from sigattn.ops.hopper.forward import barriers, item_of, turns_of, weights, work_of


@gluon.jit
def places(
    own_first, own_second, first, second, STAGES: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Places in shared memory for what groups of warps keep of two tensors, and rings for tiles of two that are walked.

    With barriers for each: filled by a copy, and left (a group's own by that group, a tile by both).
    """
    dtype: gl.constexpr = first.dtype
    own = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], own_first.layout)
    other_own = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], own_second.layout)
    ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, D], first.layout)
    other_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, D], second.layout)
    own_full, own_empty = barriers(2, 1), barriers(2, 1)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    return own, other_own, ring, other_ring, own_full, own_empty, full, empty


@gluon.jit
def bring_own(
    first, second, memory, b, h, start, turn, ROWS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Bring what the groups keep in a turn, as soon as they have left their places."""
    own, other_own, _ring, _other_ring, own_full, own_empty, _full, _empty = memory
    for g in gl.static_range(2):
        mbarrier.wait(own_empty.index(g), turn & 1 ^ 1)
        mbarrier.expect(own_full.index(g), 2 * ROWS * D * 2)
        place = [b, h, start + g * ROWS, 0]
        tma.async_copy_global_to_shared(first, place, own_full.index(g), own.index(g))
        tma.async_copy_global_to_shared(second, place, own_full.index(g), other_own.index(g))


@gluon.jit
def bring_tiles(
    first, second, memory, count, b, h, heads, tiles, start, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Bring tiles of rows from ``start`` on, of some heads one after another, as soon as both groups left a place."""
    _own, _other_own, ring, other_ring, _own_full, _own_empty, full, empty = memory
    for step in range(heads * tiles):
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), count // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(stage), 2 * BLOCK * D * 2)
        place = [b, h + step // tiles, start + step % tiles * BLOCK, 0]
        tma.async_copy_global_to_shared(first, place, full.index(stage), ring.index(stage))
        tma.async_copy_global_to_shared(second, place, full.index(stage), other_ring.index(stage))
        count += 1
    return count


@gluon.jit
def queries_of(column_start, n, query_offset, CAUSAL: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr):
    """Of two groups' keys: the first query to visit, how many tiles, and how many of them the mask crosses."""
    first_query = 0
    edges = gl.minimum(query_offset, 0)  # 0, but the compiler does not know that
    if CAUSAL:
        first_query = gl.minimum(gl.maximum(column_start - query_offset, 0) // BLOCK * BLOCK, n)
        # tiles of queries that do not all see the last of these keys
        edges = gl.maximum(gl.cdiv(column_start + 2 * ROWS - 1 - query_offset - first_query, BLOCK), 0)
    return first_query, gl.cdiv(n - first_query, BLOCK), edges


@gluon.jit
def keys_of_turn(
    turn, n, keys, heads, query_offset, GROUP: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """A program's keys in a turn: sample, key head, first key, first query, tiles of queries, those at the mask."""
    own_tiles = gl.cdiv(keys, 2 * ROWS)
    kv_heads = heads // GROUP
    item = item_of(turn, CAUSAL)
    column_start = item % own_tiles * 2 * ROWS  # under a causal mask the first keys have the most to do
    head = item // own_tiles
    first_query, tiles, edges = queries_of(column_start, n, query_offset, CAUSAL, BLOCK, ROWS)
    return head // kv_heads, head % kv_heads, column_start, first_query, tiles, edges


@gluon.jit
def produce_queries(
    query, key, value, grad_out, memory, problem, GROUP: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Bring keys and values, then queries and dO of all heads that share them, turn after turn."""
    n, keys, heads, query_offset, turns = problem
    count = 0  # tiles so far
    for turn in range(turns):
        b, h_kv, column_start, first_query, tiles, _edges = keys_of_turn(
            turn, n, keys, heads, query_offset, GROUP, CAUSAL, BLOCK, ROWS
        )
        bring_own(key, value, memory, b, h_kv, column_start, turn, ROWS, D)
        count = bring_tiles(
            query, grad_out, memory, count, b, h_kv * GROUP, GROUP, tiles, first_query, BLOCK, STAGES, D
        )  # fmt: skip


@gluon.jit
def logit_gradient(p, dp, unit, lower, SHIFTED: gl.constexpr):
    """``activation.logit_gradient``, number for number."""
    if SHIFTED:
        ds = p * dp * (lower - p * (unit * lower))
    else:
        ds = (p - p * p) * dp
    return ds


@gluon.jit
def transposed(ring, stage, ROWS: gl.constexpr, D: gl.constexpr):
    """A tile as the second factor of a product over features, (D, ROWS)."""
    return ring.index(stage).reshape([ROWS, D]).permute([1, 0])


@gluon.jit
def consume_queries(
    grad_key, grad_value, memory, problem, scalars, GROUP_OF_WARPS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, SIGMOID: gl.constexpr, SHIFTED: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """The gradients dK and dV of one group's 64 keys, turn after turn."""
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
    count = 0  # tiles so far
    for turn in range(turns):
        b, h_kv, column_start, first_query, tiles, edges = keys_of_turn(
            turn, n, keys, heads, query_offset, GROUP, CAUSAL, BLOCK, ROWS
        )
        start = column_start + GROUP_OF_WARPS * ROWS
        j = start + gl.arange(0, ROWS, gl.SliceLayout(1, tile_layout))
        acc_k = gl.zeros([ROWS, D], gl.float32, out_layout)
        acc_v = gl.zeros([ROWS, D], gl.float32, out_layout)
        mbarrier.wait(own_full.index(GROUP_OF_WARPS), turn & 1)
        for step in range(GROUP * tiles):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            products = warpgroup_mma(k, transposed(ring, stage, BLOCK, D), empty_tile, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, transposed(grads_ring, stage, BLOCK, D), empty_tile, use_acc=False, is_async=True)
            products = warpgroup_mma_wait(1, deps=[products])
            tile = step % gl.maximum(tiles, 1)
            i = query_offset + first_query + tile * BLOCK + rows
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
            count += 1
        # the places of the keys and values are free now: they take the gradients
        k.store((acc_k * logit_scale).to(grad_key.dtype))
        v.store((acc_v * out_scale).to(grad_value.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(grad_key, [b, h_kv, start, 0], my_keys)
        tma.async_copy_shared_to_global(grad_value, [b, h_kv, start, 0], my_values)
        tma.store_wait(0)
        mbarrier.arrive(own_empty.index(GROUP_OF_WARPS))


@gluon.jit(do_not_specialize=["n", "keys", "batch_heads", "query_offset"])
def hopper_bwd_dkdv_kernel(
    query, key, value, grad_out, grad_key, grad_value, n, keys, heads, batch_heads, query_offset,
    z_scale, z_bias, unit, lower, out_scale, logit_scale,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    SIGMOID: gl.constexpr, SHIFTED: gl.constexpr, ROWS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """The gradients dK and dV of tiles of 128 keys of one key head, as many as a program gets of all."""
    memory = places(key, value, query, grad_out, STAGES, BLOCK, ROWS, D)
    problem = (n, keys, heads, query_offset, turns_of(gl.cdiv(keys, 2 * ROWS) * batch_heads, CAUSAL))
    scalars = (z_scale, z_bias, unit, lower, out_scale, logit_scale)
    gl.warp_specialize(
        [
            (consume_queries, (grad_key, grad_value, memory, problem, scalars, gl.constexpr(0), GROUP, D, BLOCK, STAGES,
                               CAUSAL, SIGMOID, SHIFTED, ROWS)),
            (consume_queries, (grad_key, grad_value, memory, problem, scalars, gl.constexpr(1), GROUP, D, BLOCK, STAGES,
                               CAUSAL, SIGMOID, SHIFTED, ROWS)),
            (produce_queries, (query, key, value, grad_out, memory, problem, GROUP, D, BLOCK, STAGES, CAUSAL, ROWS)),
        ],
        [4, 4],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def produce_keys(
    query, key, value, grad_out, memory, problem, GROUP: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Bring queries and dO, then the keys and values that they see, turn after turn."""
    n, keys, heads, query_offset, turns = problem
    count = 0  # tiles so far
    for turn in range(turns):
        b, h, row_start, tiles, _full = work_of(turn, n, keys, heads, query_offset, CAUSAL, 2 * ROWS, BLOCK)
        bring_own(query, grad_out, memory, b, h, row_start, turn, ROWS, D)
        count = bring_tiles(key, value, memory, count, b, h // GROUP, 1, tiles, 0, BLOCK, STAGES, D)


@gluon.jit
def consume_keys(
    grad_query, memory, problem, scalars, GROUP_OF_WARPS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, SIGMOID: gl.constexpr, SHIFTED: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The gradient dQ of one group's 64 queries, turn after turn."""
    queries, grads, ring, values_ring, own_full, own_empty, full, empty = memory
    n, keys, heads, query_offset, turns = problem
    z_scale, z_bias, unit, lower, logit_scale = scalars
    tile_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    mine = queries.index(GROUP_OF_WARPS)
    q, do = mine.reshape([ROWS, D]), grads.index(GROUP_OF_WARPS).reshape([ROWS, D])
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, tile_layout))
    empty_tile = gl.zeros([ROWS, BLOCK], gl.float32, tile_layout)
    count = 0  # tiles so far
    for turn in range(turns):
        b, h, row_start, tiles, full_tiles = work_of(turn, n, keys, heads, query_offset, CAUSAL, 2 * ROWS, BLOCK)
        start = row_start + GROUP_OF_WARPS * ROWS
        i = query_offset + start + gl.arange(0, ROWS, gl.SliceLayout(1, tile_layout))
        acc = gl.zeros([ROWS, D], gl.float32, out_layout)
        mbarrier.wait(own_full.index(GROUP_OF_WARPS), turn & 1)
        for tile in range(tiles):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
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
            count += 1
        q.store((acc * logit_scale).to(grad_query.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(grad_query, [b, h, start, 0], mine)
        tma.store_wait(0)
        mbarrier.arrive(own_empty.index(GROUP_OF_WARPS))


@gluon.jit(do_not_specialize=["n", "keys", "batch_heads", "query_offset"])
def hopper_bwd_dq_kernel(
    query, key, value, grad_out, grad_query, n, keys, heads, batch_heads, query_offset,
    z_scale, z_bias, unit, lower, logit_scale,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    SIGMOID: gl.constexpr, SHIFTED: gl.constexpr, ROWS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """The gradient dQ of tiles of 128 queries of one head, as many as a program gets of all."""
    memory = places(query, grad_out, key, value, STAGES, BLOCK, ROWS, D)
    problem = (n, keys, heads, query_offset, turns_of(gl.cdiv(n, 2 * ROWS) * batch_heads, CAUSAL))
    scalars = (z_scale, z_bias, unit, lower, logit_scale)
    gl.warp_specialize(
        [
            (consume_keys, (grad_query, memory, problem, scalars, gl.constexpr(0), D, BLOCK, STAGES, CAUSAL, SIGMOID,
                            SHIFTED, ROWS)),
            (consume_keys, (grad_query, memory, problem, scalars, gl.constexpr(1), D, BLOCK, STAGES, CAUSAL, SIGMOID,
                            SHIFTED, ROWS)),
            (produce_keys, (query, key, value, grad_out, memory, problem, GROUP, D, BLOCK, STAGES, CAUSAL, ROWS)),
        ],
        [4, 4],
        [REGISTERS, 24],
    )  # fmt: skip
