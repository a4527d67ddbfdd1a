"""Sigmoid attention in tiles: any device and dtype of PyTorch, memory linear in the length, forward and backward.

Partial results over disjoint sets of keys add, so that only the weights of one tile are stored at a time. The outer
loop of the forward pass is over blocks of queries (Algorithm 1 of the paper), that of the backward pass over blocks of
keys (Algorithm 2), with transposed tiles (keys, queries), for which four of the five products need no transpose. Tiles
outside the window are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sigattn.ops.cpu import short
from sigattn.ops.cpu.matmul import Capped, Fused, fold, linear
from sigattn.ops.cpu.tiles import Group, Span, groups
from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.problem import UNLIMITED, Problem, VarlenProblem


def unavailable(_: Problem | VarlenProblem) -> None:
    """Support every problem; always returns None."""


def forward(problem: Problem, saved: list[Tensor] | None = None) -> Tensor:  # (B, Hq, N, Dv)
    """Return the output of sigmoid attention; append the weights of each tile to ``saved``, for ``backward``."""
    if (dtype := short.plan(problem)) is not None:
        return short.forward(problem, dtype, saved)
    query, value = problem.query, problem.value
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    if not value.shape[2]:
        out.zero_()
    elif out.numel():
        for group in groups(problem, keep_tiles=saved is not None):
            if saved is not None:
                _forward_saving(group, group.heads_of(out), saved)
            elif group.bare:
                _forward_unmasked_head(group, group.heads_of(out))
            else:
                _forward_group(group, group.heads_of(out))
    return out


def _forward_unmasked_head(group: Group, out: Tensor) -> None:  # out: (nb, nh, rep, N, Dv)
    """Compute ``_forward_group`` for one key head with fused products and no mask other than a window.

    This shorter loop saves about 5 % of a causal forward, because each product evicts the interpreter's data from the
    processor's caches, so that Python code between products is several times slower than alone (docs/log.md).
    """
    products = group.products
    assert isinstance(products, Fused)
    left, right, query_offset = group.problem.left, group.problem.right, group.problem.query_offset
    key, value = products.key[0], group.value[0].t()  # (M, E), (Dv, M)
    for query, head_out in zip(products.query[0], out[0, 0], strict=True):  # (N, E), (N, Dv)
        for i, stop in group.short_blocks(Span(0, group.num_queries), long_side=group.num_keys):
            total: Tensor | None = None
            first, last = group.visible_range(Span(i, stop), 0)
            for j in range(first, last, group.long_side):
                end = min(j + group.long_side, last)
                p = linear(query[i:stop], key[j:end], "sigmoid")  # (R, C)
                first_k, last_k = i + query_offset - left, i + query_offset + right  # window of the block's first query
                if right != UNLIMITED and end > last_k + 1:
                    edge = max(j, last_k + 1)
                    p[:, edge - j :].tril_(last_k - edge)
                if left != UNLIMITED and j < stop - 1 - i + first_k:
                    edge = min(end, stop - 1 - i + first_k)
                    p[:, : edge - j].triu_(first_k - j)
                part = linear(p, value[:, j:end], "none")  # (R, Dv)
                total = part if total is None else total.to(group.accumulator).add_(part)
            head_out[i:stop] = 0 if total is None else total


def _forward_group(group: Group, out: Tensor) -> None:  # out: (nb, nh, rep, N, Dv)
    for rows in group.short_blocks(Span(0, group.num_queries), long_side=group.num_keys):
        total: Tensor | None = None
        for columns in group.columns_of(rows):
            p = group.tile(rows, columns, transposed=False)  # (G, rep·R, C)
            dropped = group.dropped(rows, columns)
            if dropped is not None:
                group.split_heads(p, rows, transposed=False).masked_fill_(dropped, 0)
            part = group.products.combine(p, group.value[:, columns.slice])  # (G, rep·R, Dv)
            total = part if total is None else total.to(group.accumulator).add_(part)
        if total is None:
            out[..., rows.slice, :] = 0
            continue
        if group.problem.seed is not None:
            total *= group.problem.keep_scale
        out[..., rows.slice, :] = group.split_heads(total, rows, transposed=False)


def _forward_saving(group: Group, out: Tensor, saved: list[Tensor]) -> None:  # out: (nb, nh, rep, N, Dv)
    """Compute ``_forward_group`` in the tiles of ``_backward_group``, and append their weights to ``saved``."""
    totals = group.query.new_zeros((*group.query.shape[:3], out.shape[-1]), dtype=group.accumulator)
    for columns in group.short_blocks(Span(0, group.num_keys), long_side=group.num_queries, dimension=1):
        for rows in group.rows_of(columns):
            p = group.tile(rows, columns, transposed=True)  # (G, C, rep·R)
            saved.append(p)
            dropped = group.dropped(rows, columns)
            if dropped is not None:
                p = p.clone()
                group.split_heads(p, rows, transposed=True).masked_fill_(dropped, 0)
            part = group.products.combine_transposed(p, group.value[:, columns.slice])  # (G, rep·R, Dv)
            totals[:, :, rows.slice] += part.view(len(part), group.repeat, rows.size, -1)
    if group.problem.seed is not None:
        totals *= group.problem.keep_scale
    out.copy_(totals.view(out.shape))


def backward(
    problem: Problem, grad_out: Tensor, needs_grad: NeedsGrad, saved: Sequence[Tensor] | None = None
) -> Gradients:
    """Return the gradients in ``needs_grad``, by the table of App. F with corrections (docs/paper-notes.md).

    Args:
        problem: as passed to ``forward``.
        grad_out: (B, Hq, N, Dv).
        needs_grad: the gradients to compute.
        saved: what ``forward`` has saved; None computes the weights again.
    """
    if (dtype := short.plan(problem)) is not None:
        return short.backward(problem, dtype, grad_out, needs_grad, saved)
    sums = GradientSums(problem, needs_grad)
    weights = None if saved is None else iter(saved)
    if grad_out.numel() and problem.key.shape[2]:
        for group in groups(problem):
            _backward_group(group, group.queries_of(grad_out), sums, weights)
    return sums.result(problem)


class GradientSums:
    """Buffers of the gradients; those of bias, mask and slopes are summed over tiles in float32 or better."""

    def __init__(self, problem: Problem | VarlenProblem, needs_grad: NeedsGrad) -> None:
        def zeros(t: Tensor | None, needed: bool, dtype: torch.dtype) -> Tensor | None:
            return torch.zeros(t.shape, dtype=dtype, device=problem.query.device) if needed and t is not None else None

        own, wide = problem.query.dtype, torch.promote_types(problem.query.dtype, torch.float32)
        self.query: Tensor | None = zeros(problem.query, needs_grad.query, own)
        self.key: Tensor | None = zeros(problem.key, needs_grad.key, own)
        self.value: Tensor | None = zeros(problem.value, needs_grad.value, own)
        self.bias: Tensor | None = zeros(problem.bias, needs_grad.bias, wide)
        self.attn_mask: Tensor | None = zeros(problem.attn_mask, needs_grad.attn_mask, wide)
        self.alibi_slopes: Tensor | None = zeros(problem.alibi_slopes, needs_grad.alibi_slopes, wide)
        self.only_value: bool = not (
            needs_grad.query or needs_grad.key or needs_grad.bias or needs_grad.attn_mask or needs_grad.alibi_slopes
        )

    def result(self, problem: Problem | VarlenProblem) -> Gradients:
        """Return the gradients in the dtypes of the problem's tensors."""

        def cast(t: Tensor | None, like: Tensor | None) -> Tensor | None:
            return t if t is None or like is None else t.to(like.dtype)

        return Gradients(
            self.query,
            self.key,
            self.value,
            cast(self.bias, problem.bias),
            cast(self.attn_mask, problem.attn_mask),
            cast(self.alibi_slopes, problem.alibi_slopes),
        )


def _backward_group(
    group: Group, grad_out: Tensor, sums: GradientSums, saved: Iterator[Tensor] | None
) -> None:  # grad_out: (G, rep, N, Dv)
    if group.problem.seed is not None:
        grad_out = grad_out * group.problem.keep_scale
    grad_query = torch.zeros_like(group.query, dtype=group.accumulator) if sums.query is not None else None
    for columns in group.short_blocks(Span(0, group.num_keys), long_side=group.num_queries, dimension=1):
        grad_key: Tensor | None = None
        grad_value: Tensor | None = None
        for rows in group.rows_of(columns):
            p = group.tile(rows, columns, transposed=True) if saved is None else next(saved)  # (G, C, rep·R)
            p, grad_logits = _backward_tile(group, p, grad_out, rows, columns, sums)
            if sums.value is not None:
                part = group.products.combine(p, fold(grad_out, rows.slice))  # dV = Pᵀ dO: (G, C, Dv)
                grad_value = part if grad_value is None else grad_value.to(group.accumulator).add_(part)
            if sums.key is not None:
                part = group.products.combine(grad_logits, fold(group.query, rows.slice))  # dK = dSᵀ Q: (G, C, D)
                grad_key = part if grad_key is None else grad_key.to(group.accumulator).add_(part)
            if grad_query is not None:
                part = group.products.combine_transposed(grad_logits, group.key[:, columns.slice])  # dQ = dS K
                grad_query[:, :, rows.slice] += part.view(len(part), group.repeat, rows.size, -1)
        _store(group, sums.value, grad_value, columns, 1.0)
        _store(group, sums.key, grad_key, columns, group.problem.scale_value)
    if grad_query is not None and sums.query is not None:
        target = group.heads_of(sums.query)  # (nb, nh, rep, N, D)
        target.copy_(grad_query.mul_(group.problem.scale_value).view(target.shape))


def _backward_tile(
    group: Group, p: Tensor, grad_out: Tensor, rows: Span, columns: Span, sums: GradientSums
) -> tuple[Tensor, Tensor]:  # p: (G, C, rep·R)
    """Return the weights (after dropout, unscaled) and the gradient of scale · Q Kᵀ of one tile, both transposed."""
    if sums.only_value and group.problem.seed is None:
        return p, p
    d = group.products.outer(group.value[:, columns.slice], fold(grad_out, rows.slice))  # dPᵀ = V dOᵀ
    dropped = group.dropped(rows, columns)
    if dropped is None:
        torch.ops.aten.sigmoid_backward.grad_input(d, p, grad_input=d)  # dS = dP ∘ P ∘ (1 − P), in one pass
    else:
        group.split_heads(d, rows, transposed=True).masked_fill_(dropped, 0)
        torch.ops.aten.sigmoid_backward.grad_input(d, p, grad_input=d)
        p = p.clone()  # it may be saved for another backward pass
        group.split_heads(p, rows, transposed=True).masked_fill_(dropped, 0)
    _add_small_gradients(group, group.split_heads(d, rows, transposed=True), rows, columns, sums)
    if isinstance(group.products, Capped):  # bias, mask and slopes are added after the cap
        d.mul_(group.products.slope(rows.slice, columns.slice, transposed=True))
    return p, d


def _add_small_gradients(group: Group, d: Tensor, rows: Span, columns: Span, sums: GradientSums) -> None:
    """Add the sums of a tile's logit gradient (nb, nh, rep, R, C) to the gradients of bias, mask and slopes."""
    for total in (sums.bias, sums.attn_mask):
        if total is not None:
            target = group.part(total, rows, columns)
            if d.dtype is torch.bfloat16 and target.shape == (*d.shape[:-1], 1):
                target += d.sum(-1, keepdim=True)  # in another dtype it converts a copy: 4 times the rest of dS
            else:
                target += _sum_to(d, target)
    if sums.alibi_slopes is not None:
        target = group.slopes_of(sums.alibi_slopes)  # (nb or 1, nh, rep, 2)
        for side, distance in enumerate(group.distances(rows, columns)):
            target[..., side] -= _sum_to((d * distance).sum((-1, -2)), target[..., side])


def _sum_to(t: Tensor, target: Tensor) -> Tensor:
    """Sum t over the dimensions in which the target has size 1, in the target's dtype."""
    reduced = [i for i, (a, b) in enumerate(zip(t.shape, target.shape, strict=True)) if a != b]
    return t.sum(reduced, keepdim=True, dtype=target.dtype) if reduced else t


def _store(group: Group, target: Tensor | None, part: Tensor | None, columns: Span, factor: float) -> None:
    """Write the gradient of a block of keys (G, C, E), times ``factor``, into (B, Hkv, M, E)."""
    if target is None or part is None:
        return
    if factor != 1.0:
        part = part * factor
    nb, nh, _ = group.shape
    part = part.view(nb, nh, columns.size, -1)
    if group.ragged:  # keys beyond key_lengths have gradient 0, even if dO is not finite
        part = part.masked_fill(~group.exists(columns).view(-1, 1, columns.size, 1), 0)
    target[group.batch.slice, group.heads.slice, columns.slice] = part
