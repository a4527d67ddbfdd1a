"""Sigmoid attention in tiles: any device and dtype of PyTorch, memory linear in the length, forward and backward.

Partial results over disjoint sets of keys add, so that only the weights of one tile are stored at a time. The outer
loop of the forward pass is over blocks of queries (Algorithm 1 of the paper), that of the backward pass over blocks of
keys (Algorithm 2). Tiles that a window or a ``BlockMask`` hides are skipped. The heads of short sequences have one tile
each, and as many as fit the processor's cache are computed at a time.
"""

import math

import torch
from torch import Tensor

from sigattn.ops import normalization
from sigattn.ops.blocked.tiles import WHOLE_UP_TO, Tiles, arithmetic, choose_tiles, groups, new_memory, of_tile
from sigattn.ops.dropout import keep_scale
from sigattn.ops.gradients import Gradients, NeedsGrad, Result, Saved
from sigattn.ops.problem import UNLIMITED, Problem, in_dtypes, new_gradients, new_result, scale_of, select_rows
from sigattn.ops.reference import distances

MOST_SAVED = 4  # times the memory of query, key and value: weights that are saved at most


def saved_weights(problem: Problem) -> Saved | None:
    """Return shape and dtype of the weights to save for the backward pass, (B, Hq, padded N, padded M), or None.

    Saving them makes a backward pass of four products instead of five. It is done on a CPU if they take a few times the
    memory of the inputs, and unless tiles that a window hides can be skipped.
    """
    p = problem
    (batch, heads, n, d), (_, key_heads, m, dv) = p.query.shape, p.value.shape
    if p.query.device.type != "cpu" or p.mask_table is not None:
        return None
    if (p.left != UNLIMITED or p.right != UNLIMITED) and n * m > WHOLE_UP_TO:
        return None
    dtype, rows, columns = arithmetic(p)
    inputs = heads * n * d + key_heads * m * (d + dv)
    fits = heads * rows * columns * dtype.itemsize <= MOST_SAVED * inputs * p.query.dtype.itemsize
    return ((batch, heads, rows, columns), dtype) if fits and batch * heads * n * m else None


def forward(problem: Problem, saved: Saved | None) -> Result:
    """Return the output of sigmoid attention, (B, Hq, N, Dv), and what the backward pass needs."""
    result = new_result(problem.query, problem.value.shape[3], problem.normalize, saved)
    attend(problem, result)
    return result


def attend(problem: Problem, result: Result) -> None:
    """Write the output, and unless they are empty the weights and the sums of the rows."""
    _attend(problem, result)
    if not problem.normalize or not problem.key.shape[2]:
        return
    sums, row_lifts = result.row_sums.unbind(-1)
    row_lifts.zero_()
    has_small_sum = bool((sums < normalization.SMALLEST_SUM).any())
    if has_small_sum and (lifts := normalization.find_lifts(problem, result.row_sums)) is not None:
        _attend(normalization.lifted(problem, lifts), result)
        row_lifts.copy_(lifts)


def _attend(problem: Problem, result: Result) -> None:
    """Write the result without further lifts."""
    if not result.out.numel() or not problem.key.shape[2]:
        result.out.zero_()
        result.row_sums.zero_()
        return
    tiling = choose_tiles(problem, result.weights, outer=0)
    memory = result.weights if tiling.is_saved else new_memory(problem, tiling)
    for part, (out, weights, row_sums) in groups(problem, tiling, result):
        tiles, factor = Tiles(part, tiling), keep_scale(part.dropout_p)
        memory = weights if tiling.is_saved else memory
        tiles.prepare_logits()
        for i, visible in tiles.loop(outer=0):
            target = out if tiling.is_whole else out[:, :, i]  # (B, H, R, Dv)
            total: Tensor | None = None  # (G, rep · R, Dv)
            sums: Tensor | None = None  # (G, rep · R, 1)
            for j in visible:
                p = tiles.weights(memory, i, j)  # P = σ(scale · Q Kᵀ + b), (G, rep · R, C)
                if part.normalize:
                    row_sum = p.sum(-1, keepdim=True, dtype=row_sums.dtype)
                    sums = row_sum if sums is None else sums.add_(row_sum)  # t += P 1
                if part.seed is not None:
                    p = p.masked_fill(tiles.dropped(i, j), 0)
                total = add_product(total, p, tiles.columns(tiles.value, j), target)  # O += P V
            if part.normalize:
                write(select_rows(row_sums[..., :1], i), sums)
                if total is not None and sums is not None:
                    total.mul_(torch.where(sums == 0, 0, 1 / sums))  # O / t
            write(target, total, factor)


def backward(problem: Problem, grad_out: Tensor, result: Result, needs_grad: NeedsGrad) -> Gradients:
    """Return the gradients in ``needs_grad``, by the table of App. F with corrections (docs/paper-notes.md)."""
    gradients = new_gradients(problem, needs_grad)
    differentiate(problem, grad_out, result, gradients)
    return in_dtypes(gradients, problem)


def differentiate(problem: Problem, grad_out: Tensor, result: Result, gradients: Gradients) -> None:
    """Write the gradients of query, key and value, and add those of bias, mask and slopes."""
    row_terms, operands = result.row_sums, [g for g in gradients[:3] if g is not None]
    if problem.normalize:
        problem, grad_out, row_terms = normalization.backward_operands(problem, grad_out, result)
    if not grad_out.numel() or not problem.key.shape[2]:
        for gradient in operands:
            gradient.zero_()
        return
    tiling, scale = choose_tiles(problem, result.weights, outer=1), scale_of(problem)
    memory = result.weights if tiling.is_saved else new_memory(problem, tiling)
    memory_of_d = new_memory(problem, tiling)
    has_options = any(g is not None for g in gradients[3:])
    incoming = Result(grad_out, result.weights, row_terms)
    for part, (d_out, weights, row_terms), sums in groups(problem, tiling, incoming, gradients):
        d_query, d_key, d_value, *_ = sums
        tiles, memory = Tiles(part, tiling), weights if tiling.is_saved else memory
        if not tiling.is_saved or part.softcap:
            tiles.prepare_logits()
        d_out = tiles.operand(d_out, tiling.num_queries)  # (G, rep · N, Dv)
        query_sum: Tensor | None = None  # (B, H, N, D)
        if d_query is not None and not tiling.is_whole:
            shape, wide = d_query.shape, torch.promote_types(tiling.dtype, torch.float32)
            query_sum = d_query.new_zeros(*shape[:2], tiling.num_queries, shape[3], dtype=wide)
        for j, visible in tiles.loop(outer=1):
            key, value = tiles.columns(tiles.key, j), tiles.columns(tiles.value, j)  # (G, C, D or Dv)
            d_key_rows, d_value_rows = select_rows(d_key, j), select_rows(d_value, j)  # (B, Hkv, C, D or Dv)
            key_sum: Tensor | None = None  # (G, C, D)
            value_sum: Tensor | None = None  # (G, C, Dv)
            for i in visible:
                query, d_rows = tiles.rows(tiles.query, i), tiles.rows(d_out, i)  # (G, rep · R, D or Dv)
                d_rows = d_rows if part.seed is None else d_rows * keep_scale(part.dropout_p)
                d = torch.bmm(d_rows, value.mT, out=tiles.tile(memory_of_d, i, j))  # dP = dO Vᵀ
                p = tiles.tile(memory, i, j) if tiling.is_saved else tiles.weights(memory, i, j)
                dropped = None if part.seed is None else tiles.dropped(i, j)
                if dropped is not None:
                    d.masked_fill_(dropped, 0)
                if part.normalize:
                    tiles.by_head(d, i, j).sub_(select_rows(row_terms, i))  # dP - δ
                torch.ops.aten.sigmoid_backward.grad_input(d, p, grad_input=d)  # dS = dP ∘ P ∘ (1 - P)
                if tiles.may_hide:
                    tiles.hide(d, i, j)  # 0 · NaN where V or dO is not finite
                if has_options:
                    add_sums(tiles.by_head(d, i, j), part, i, j, sums)
                if part.softcap:  # 1 - tanh²; NaN becomes 0: if its key is visible, dS is NaN already
                    tanh = tiles.logits(torch.empty_like(d), i, j)
                    d *= tanh.square_().neg_().add_(1).nan_to_num_(0.0)
                if query_sum is None:  # the only tile
                    query_sum = add_product(None, d, key, d_query)  # dQ = dS K
                else:
                    query_rows = select_rows(query_sum, i)
                    query_rows += torch.bmm(d, key).view_as(query_rows)  # dQ += dS K
                key_sum = add_product(key_sum, d.mT, query, d_key_rows)  # dK += dSᵀ Q
                p = p if dropped is None else p.masked_fill(dropped, 0)
                value_sum = add_product(value_sum, p.mT, d_rows, d_value_rows)  # dV += Pᵀ dO
            write(d_key_rows, key_sum, scale)
            write(d_value_rows, value_sum)
        write(d_query, query_sum, scale)
    if problem.key_lengths is not None:  # some keys are in no tile; others have weights, of values that are 0
        lengths = problem.key_lengths.to(grad_out.device).view(-1, 1, 1, 1)
        is_beyond = torch.arange(problem.key.shape[2], device=grad_out.device).unsqueeze(-1) >= lengths
        for operand in (gradients.key, gradients.value):
            if operand is not None:
                operand.masked_fill_(is_beyond, 0)


def add_product(total: Tensor | None, a: Tensor, b: Tensor, target: Tensor | None) -> Tensor | None:
    """Return total + a b, (G, R, C) times (G, C, E); the first product in the memory of the target if it can be.

    The sum over several tiles is in float32 or better. None without a target, which is a gradient that is not needed.
    """
    if target is None:
        return None
    if total is not None:
        return total.to(torch.promote_types(a.dtype, torch.float32)).add_(torch.bmm(a, b))
    shape = a.shape[0], a.shape[1], b.shape[2]
    fits = target.dtype is a.dtype and target.is_contiguous() and target.numel() == math.prod(shape)
    return torch.bmm(a, b, out=target.view(shape)) if fits else torch.bmm(a, b)


def write(target: Tensor | None, total: Tensor | None, factor: float = 1.0) -> None:
    """Write ``factor`` times a total, without its padding rows, unless it is in the memory of the target already."""
    if target is None:
        return
    if total is None:  # no tile was visible
        target.zero_()
        return
    if factor != 1.0:
        total.mul_(factor)
    if total.data_ptr() != target.data_ptr() and target.numel():
        *heads, rows, features = target.shape
        target.copy_(total.view(*heads, -1, features)[..., :rows, :])


def add_sums(d: Tensor, problem: Problem, i: slice, j: slice, gradients: Gradients) -> None:
    """Add the sums of a tile's dS, (B, H, R, C), to the gradients of bias, mask and slopes."""
    if gradients.bias is not None:
        bias = select_rows(gradients.bias, i)
        bias += d.sum(-1, keepdim=True, dtype=bias.dtype).sum_to_size(bias.shape)
    if gradients.attn_mask is not None:
        mask = of_tile(gradients.attn_mask, i, j)
        mask += d.sum_to_size(mask.shape)
    if gradients.alibi_slopes is not None:
        rows = i.start + problem.query_offset, i.stop + problem.query_offset
        for side, distance in enumerate(distances(rows, (j.start, j.stop), d.dtype, d.device)):
            slopes = gradients.alibi_slopes[..., side]  # (B or 1, H)
            slopes -= (d * distance).sum((-1, -2)).sum_to_size(slopes.shape)
