"""Sigmoid attention in tiles: any device and dtype of PyTorch, memory linear in the length, forward and backward.

Partial results over disjoint sets of keys add, so that only the weights of one tile are stored at a time. The outer
loop of the forward pass is over blocks of queries (Algorithm 1 of the paper), that of the backward pass over blocks of
keys (Algorithm 2). Tiles that a window or a ``BlockMask`` hides are skipped. The heads of short sequences have one tile
each, and as many as fit the processor's cache are computed at a time.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from sigattn.ops import normalization
from sigattn.ops.blocked.tiles import WHOLE_UP_TO, Group, arithmetic, choose_tiles, groups, new_memory, padded
from sigattn.ops.gradients import Gradients, NeedsGrad, Result, Saved
from sigattn.ops.normalization import new_row_sums
from sigattn.ops.positions import distances
from sigattn.ops.problem import UNLIMITED, KVCacheProblem, Problem, VarlenProblem, new_output

MOST_SAVED = 4  # times the memory of query, key and value: weights that are saved at most


def unavailable(_: Problem | VarlenProblem | KVCacheProblem) -> None:
    """Support every problem; always returns None."""


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
    dtype = arithmetic(p)
    shape = batch, heads, padded(n, dtype), padded(m, dtype)
    inputs = heads * n * d + key_heads * m * (d + dv)
    fits = heads * shape[2] * shape[3] * dtype.itemsize <= MOST_SAVED * inputs * p.query.dtype.itemsize
    return (shape, dtype) if fits and batch * heads * n * m else None


def forward(problem: Problem, saved: Saved | None) -> Result:
    """Return the output of sigmoid attention, (B, Hq, N, Dv), and what the backward pass needs."""
    shape, dtype = saved or ((0,), None)
    result = Result(
        new_output(problem.query, problem.value.shape[-1]),
        problem.query.new_empty(shape, dtype=dtype),
        new_row_sums(problem.query) if problem.normalize else problem.query.new_empty(0),
    )
    attend(problem, result)
    return result


def attend(problem: Problem, result: Result) -> None:
    """Write the output, and unless they are empty the weights and the sums of the rows."""
    if problem.normalize:
        normalization.compute(problem, result.row_sums, functools.partial(_attend, result=result))
    else:
        _attend(problem, result)


def _attend(problem: Problem, result: Result) -> None:
    out, weights, row_sums = result
    if not out.numel() or not problem.key.shape[2]:
        out.zero_()
        row_sums.zero_()
        return
    tiling = choose_tiles(problem, weights, outer=0)
    memory = weights if tiling.is_saved else new_memory(problem, tiling)
    for group in groups(problem, tiling):
        group.prepare_logits()
        for i0 in range(0, tiling.num_queries, tiling.rows):
            i1 = min(i0 + tiling.rows, tiling.num_queries)
            target = group.rows_of(out, group.query_heads, i0, i1)  # (nb, nh · rep, R, Dv)
            total: Tensor | None = None  # (G, rep · R, Dv)
            sums: Tensor | None = None  # (G, rep · R, 1)
            for j0, j1 in group.visible(i0, i1, outer=0):
                p = group.weights(memory, i0, i1, j0, j1)  # P = σ(scale · Q Kᵀ + b), (G, rep · R, C)
                if problem.normalize:
                    part = p.sum(-1, keepdim=True, dtype=row_sums.dtype)
                    sums = part if sums is None else sums.add_(part)  # t += P 1
                p = p if problem.seed is None else group.drop(p, i0, i1, j0, j1)
                total = add_product(total, p, group.value[:, j0:j1], target)  # O += P V
            if problem.normalize:
                write(group.rows_of(row_sums[..., :1], group.query_heads, i0, i1), sums)
                if total is not None and sums is not None:  # O / t
                    inverse = torch.where(sums == 0, 0, 1 / sums)
                    total = total.mul_(inverse) if total.dtype is inverse.dtype else total * inverse
            write(target, total, problem.keep_scale)


def backward(problem: Problem, grad_out: Tensor, result: Result, needs_grad: NeedsGrad) -> Gradients:
    """Return the gradients in ``needs_grad``, by the table of App. F with corrections (docs/paper-notes.md).

    Args:
        problem: as passed to ``forward``.
        grad_out: (B, Hq, N, Dv).
        result: what ``forward`` returned; without weights, they are computed again.
        needs_grad: the gradients to compute.
    """
    gradients = new_gradients(problem, needs_grad)
    differentiate(problem, grad_out, result, gradients)
    return in_dtypes(gradients, problem)


def new_gradients(problem: Problem | VarlenProblem, needs_grad: NeedsGrad) -> Gradients:
    """Return tensors for the gradients; those of bias, mask and slopes are sums over tiles, in float32 or better."""
    p, wide = problem, torch.promote_types(problem.query.dtype, torch.float32)
    options = zip((p.bias, p.attn_mask, p.alibi_slopes), needs_grad[3:], strict=True)
    return Gradients(
        torch.empty_like(p.query) if needs_grad.query else None,
        torch.empty_like(p.key) if needs_grad.key else None,
        torch.empty_like(p.value) if needs_grad.value else None,
        *(None if t is None or not needed else t.new_zeros(t.shape, dtype=wide) for t, needed in options),
    )


def in_dtypes(gradients: Gradients, problem: Problem | VarlenProblem) -> Gradients:
    """Return the gradients of bias, mask and slopes in the dtypes of the problem's tensors."""
    options = zip(gradients[3:], (problem.bias, problem.attn_mask, problem.alibi_slopes), strict=True)
    return Gradients(*gradients[:3], *(g if g is None or t is None else g.to(t.dtype) for g, t in options))


def differentiate(problem: Problem, grad_out: Tensor, result: Result, gradients: Gradients) -> None:
    """Write the gradients of query, key and value, and add those of bias, mask and slopes."""
    row_terms = None
    if problem.normalize:
        problem, grad_out, row_terms = normalization.backward_operands(problem, grad_out, result)
    weights, (d_query, d_key, d_value, *d_options) = result.weights, gradients
    is_empty = not grad_out.numel() or not problem.key.shape[2]
    if is_empty or problem.key_lengths is not None:  # some keys are in no tile
        for gradient in (d_query, d_key, d_value):
            if gradient is not None:
                gradient.zero_()
    if is_empty:
        return
    tiling = choose_tiles(problem, weights, outer=1)
    has_options = any(d is not None for d in d_options)
    needs_d = d_query is not None or d_key is not None or has_options
    memory = weights if tiling.is_saved else new_memory(problem, tiling)
    memory_of_d = new_memory(problem, tiling) if needs_d else None
    for group in groups(problem, tiling):
        if not tiling.is_saved or problem.softcap:
            group.prepare_logits()
        d_out = group.of_queries(grad_out)  # (G, rep · N, Dv)
        d_out = d_out if problem.seed is None else d_out * problem.keep_scale
        terms = None if row_terms is None else group.of_queries(row_terms, row_terms.dtype)  # (G, rep · N, 1)
        d_query_rows = None if d_query is None else group.rows_of(d_query, group.query_heads, 0, tiling.num_queries)
        query_sums = None if d_query is None or tiling.is_whole else group.new_query_sums()  # (G, rep, N, D)
        for j0 in range(0, group.num_keys, tiling.columns):
            j1 = min(j0 + tiling.columns, group.num_keys)
            key, value = group.key[:, j0:j1], group.value[:, j0:j1]  # (G, C, D or Dv)
            d_key_rows = None if d_key is None else group.rows_of(d_key, group.heads, j0, j1)  # (nb, nh, C, D)
            d_value_rows = None if d_value is None else group.rows_of(d_value, group.heads, j0, j1)
            key_sum: Tensor | None = None  # (G, C, D)
            value_sum: Tensor | None = None  # (G, C, Dv)
            for i0, i1 in group.visible(j0, j1, outer=1):
                query, d_rows = group.rows(group.query, i0, i1), group.rows(d_out, i0, i1)  # (G, rep · R, D or Dv)
                p = group.tile(memory, i0, i1, j0, j1) if tiling.is_saved else group.weights(memory, i0, i1, j0, j1)
                if memory_of_d is not None:
                    d = group.tile(memory_of_d, i0, i1, j0, j1)
                    torch.bmm(d_rows, value.transpose(1, 2), out=d)  # dP = dO Vᵀ
                    d = d if problem.seed is None else group.drop(d, i0, i1, j0, j1)
                    d = d if terms is None else d.sub_(group.rows(terms, i0, i1))  # dP - δ
                    torch.ops.aten.sigmoid_backward.grad_input(d, p, grad_input=d)  # dS = dP ∘ P ∘ (1 - P)
                    group.hide(d, i0, i1, j0, j1)  # 0 · NaN where V or dO is not finite
                    if has_options:
                        add_sums(group, d, i0, i1, j0, j1, gradients)
                    if problem.softcap:  # bias, mask and slopes are added after the cap
                        d *= group.slope_of_cap(i0, i1, j0, j1)
                    if d_query_rows is not None and query_sums is None:  # the only tile
                        query_sums = add_product(None, d, key, d_query_rows)  # dQ = dS K
                    elif query_sums is not None:
                        query_sums[:, :, i0:i1] += torch.bmm(d, key).unflatten(1, (-1, i1 - i0))  # dQ += dS K
                    if d_key_rows is not None:
                        key_sum = add_product(key_sum, d.transpose(1, 2), query, d_key_rows)  # dK += dSᵀ Q
                if d_value_rows is not None:
                    p = p if problem.seed is None else group.drop(p, i0, i1, j0, j1)
                    value_sum = add_product(value_sum, p.transpose(1, 2), d_rows, d_value_rows)  # dV += Pᵀ dO
            if d_key_rows is not None:
                write(d_key_rows, group.existing(key_sum, j0, j1), problem.scale_value)
            if d_value_rows is not None:
                write(d_value_rows, group.existing(value_sum, j0, j1))
        if d_query_rows is not None:
            write(d_query_rows, query_sums, problem.scale_value)


def add_product(total: Tensor | None, a: Tensor, b: Tensor, target: Tensor) -> Tensor:
    """Return total + a b, (G, R, C) times (G, C, E); the first product in the memory of the target if it can be.

    The sum over several tiles is in float32 or better.
    """
    if total is not None:
        return total.to(torch.promote_types(a.dtype, torch.float32)).add_(torch.bmm(a, b))
    shape = a.shape[0], a.shape[1], b.shape[2]
    fits = target.dtype is a.dtype and target.is_contiguous() and target.numel() == math.prod(shape)
    return torch.bmm(a, b, out=target.view(shape)) if fits else torch.bmm(a, b)


def write(target: Tensor, total: Tensor | None, factor: float = 1.0) -> None:
    """Write ``factor`` times a total, without its padding rows, unless it is in the memory of the target already."""
    if total is None:  # no tile was visible
        target.zero_()
        return
    if factor != 1.0:
        total.mul_(factor)
    if total.data_ptr() != target.data_ptr() and target.numel():
        *heads, rows, features = target.shape
        target.copy_(total.view(*heads, -1, features)[..., :rows, :])


def add_sums(group: Group, d: Tensor, i0: int, i1: int, j0: int, j1: int, gradients: Gradients) -> None:
    """Add the sums of a tile's dS to the gradients of bias, mask and slopes."""
    d = group.by_head(d, i0, i1, j0, j1)  # (nb, nh, rep, R, C)
    if gradients.bias is not None:
        bias = group.of_tile(gradients.bias, i0, i1, j0, j1)
        bias += sum_to(d.sum(-1, keepdim=True), bias)
    if gradients.attn_mask is not None:
        mask = group.of_tile(gradients.attn_mask, i0, i1, j0, j1)
        mask += sum_to(d, mask)
    if gradients.alibi_slopes is not None:
        offset = group.problem.query_offset
        slopes = group.of_heads(gradients.alibi_slopes.unsqueeze(-1)).squeeze(-1)  # (nb or 1, nh, rep, 2)
        for side, distance in enumerate(distances((i0 + offset, i1 + offset), (j0, j1), d.dtype, d.device)):
            slopes[..., side] -= sum_to((d * distance).sum((-1, -2)), slopes[..., side])


def sum_to(t: Tensor, target: Tensor) -> Tensor:
    """Sum t over the dimensions in which the target has size 1, in the target's dtype."""
    reduced = [i for i, (a, b) in enumerate(zip(t.shape, target.shape, strict=True)) if a != b]
    return t.sum(reduced, keepdim=True, dtype=target.dtype) if reduced else t
