"""Calls of backend "llvm": a problem as arguments of the kernels, with copies where a tensor's layout needs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.ops.dropout import column_hashes, row_hashes, threshold
from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.llvm.arguments import Arguments, Layout, layout, readable, round_up
from sigattn.ops.llvm.kernels import FORWARD_ROWS
from sigattn.ops.llvm.launch import Kernels, float_bits, kernels
from sigattn.ops.problem import Problem, new_output


def forward(problem: Problem, saved: list[Tensor] | None = None) -> Tensor:  # (B, Hq, N, Dv)
    """Return the output of sigmoid attention; append the weights to ``saved``, for ``backward``."""
    p = problem
    (batch, heads, n, _), (_, kv, m, dv) = p.query.shape, p.value.shape
    result = p.query.new_empty(batch, heads, n, dv) if p.query.is_contiguous() else new_output(p.query, dv)
    if not result.numel() or not m:
        return result.zero_()
    compiled, arguments, own = _plan(p)
    arguments.allocate(own.forward, p.query)
    out = arguments.set_result("out", result)
    if saved is not None:
        saved.append(p.query.new_empty(batch, heads, n, round_up(m, arguments.tile)))
        arguments.set_weights(saved[0])
    blocks = -(-n // FORWARD_ROWS)
    if blocks == 1 and heads == kv:
        arguments.set("packs", 1)
    else:
        compiled.run("pack", batch * kv, arguments.data, own.threads)
    compiled.run("forward", batch * heads * blocks, arguments.data, own.threads)
    return _copied(out, result)


def backward(
    problem: Problem, grad_out: Tensor, needs_grad: NeedsGrad, saved: Sequence[Tensor] | None = None
) -> Gradients:
    """Return the gradients in ``needs_grad``.

    Args:
        saved: what ``forward`` has saved; None computes the weights again.
    """
    p = problem
    (batch, heads, n, _), (_, kv, m, _) = p.query.shape, p.value.shape
    sums = needs_grad.bias or needs_grad.alibi_slopes
    results = [torch.empty_like(t) for t in (p.query, p.key, p.value)]
    row_sums = p.query.new_zeros((1, batch, heads, n, 3), dtype=torch.float32) if sums else None
    if not grad_out.numel() or not m:
        for t in results:
            t.zero_()
    else:
        compiled, arguments, own = _plan(p)
        arguments.allocate(own.backward, p.query)
        if row_sums is not None:
            row_sums = row_sums.expand(own.parts, -1, -1, -1, -1).contiguous()
            arguments.keep("row_sums", row_sums)
            arguments.set("sums", 1 if p.alibi_slopes is None else 3)
        arguments.set_readable("grad_out", grad_out)
        if saved:
            arguments.set_weights(saved[0])
        names = ("grad_query", "grad_key", "grad_value")
        targets = [arguments.set_result(name, t) for name, t in zip(names, results, strict=True)]
        if own.parts > 1:  # each has its gradient of the queries
            field = "grad_query" if arguments.word == 1 else "grad_query_sums"
            partial = arguments.new_sums(field, own.parts, *targets[0].shape, like=p.query)
            if arguments.word == 1:
                arguments.set(field, partial.data_ptr(), *partial.stride()[1:4], partial.stride(0))
        if arguments.word == 2:
            compiled.run("pair_queries", batch * heads, arguments.data, own.threads)
        compiled.run("backward", batch * kv * own.parts, arguments.data, own.threads)
        if own.parts > 1:
            targets[0].copy_(partial.sum(0))
        results = [_copied(target, result) for target, result in zip(targets, results, strict=True)]
    query, key, value = (t if needed else None for t, needed in zip(results, needs_grad[:3], strict=True))
    if row_sums is None:
        return Gradients(query, key, value, None, None, None)
    bias = _sum_like(row_sums[..., :1], p.bias) if needs_grad.bias else None
    slopes = _sum_like(-row_sums[..., 1:].sum(3), p.alibi_slopes) if needs_grad.alibi_slopes else None
    return Gradients(query, key, value, bias, None, slopes)


def _sum_like(t: Tensor, like: Tensor | None) -> Tensor | None:
    """Sum over parts of keys, and over the dimensions in which a tensor has size 1, in its dtype."""
    return None if like is None else t.sum(0).sum_to_size(like.shape).to(like.dtype)


def _copied(out: Tensor, result: Tensor) -> Tensor:
    """Return a result that was computed in ``out``."""
    return result if out is result else result.copy_(out[..., : result.shape[-1]])


def _plan(problem: Problem) -> tuple[Kernels, Arguments, Layout]:
    """Return the kernels, the arguments that both passes take, and what the shapes determine."""
    p, compiled = problem, kernels(problem.query.dtype)
    (batch, heads, n, _), (_, _, m, _) = p.query.shape, p.value.shape
    operands = [readable(t, compiled.multiple) for t in (p.query, p.key, p.value)]
    strides = tuple(operand[1:] for operand in operands)
    shapes = p.query.shape, p.value.shape, strides
    own = layout(compiled, torch.get_num_threads(), *shapes, p.scale_value, p.left, p.right, p.query_offset)
    arguments = Arguments(compiled, own.fields)
    for name, (tensor, *_) in zip(("query", "key", "value"), operands, strict=True):
        arguments.keep(name, tensor)
    bias = p.bias_value()
    if isinstance(bias, Tensor):
        bias = bias.float()
        arguments.keep("bias", bias, *bias.expand(batch, heads, n, 1).stride()[:3])
    else:
        arguments.set("bias_value", float_bits(bias))
        arguments.set_field_as_tensor("bias", "bias_value")
    if p.key_lengths is None:
        arguments.set_field_as_tensor("lengths", "m")
    else:
        arguments.keep("lengths", p.key_lengths.to(torch.int64).contiguous(), 1)
    if p.alibi_slopes is not None:
        slopes = p.alibi_slopes.float().contiguous()
        arguments.set("alibi", 1)
        arguments.keep("slopes", slopes, *slopes.expand(batch, heads, 2).stride()[:1])
    if p.attn_mask is not None:
        _set_mask(arguments, p, p.attn_mask)
    if p.seed is not None:
        _set_dropout(arguments, p, p.seed, round_up(m, arguments.tile))
    return compiled, arguments, own


def _set_mask(arguments: Arguments, p: Problem, mask: Tensor) -> None:
    """Set a mask of bool or float32, copied unless its rows are contiguous and whole tiles."""
    m = p.key.shape[2]
    for dim in range(3):  # an expanded mask is not copied in the expanded size
        mask = mask if mask.stride(dim) else mask.narrow(dim, 0, 1)
    mask = mask.expand(*mask.shape[:3], m)
    if mask.dtype is not torch.bool:
        mask = mask.float()
    missing = -m % arguments.tile
    mask = F.pad(mask, (0, missing)) if missing else mask
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    arguments.set("mask_size", mask.itemsize)
    strides = mask.expand(*p.query.shape[:3], mask.shape[3]).stride()[:3]
    arguments.keep("mask", mask, *(mask.itemsize * stride for stride in strides))


def _set_dropout(arguments: Arguments, p: Problem, seed: Tensor, columns: int) -> None:
    device = p.query.device  # not the default device, which may be another
    heads = torch.arange(p.query.shape[0] * p.query.shape[1], device=device) + p.first_head
    rows = torch.arange(p.query.shape[2], device=device) + p.query_offset
    arguments.set("dropout", 1, threshold(p.dropout_p), float_bits(p.keep_scale))
    arguments.keep("row_hashes", row_hashes(seed, heads, rows))
    arguments.keep("column_hashes", column_hashes(seed, torch.arange(columns, device=device)))
