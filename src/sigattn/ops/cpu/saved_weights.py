"""Attention of short sequences under autograd on a CPU: the weights are saved for the backward pass.

The registered op saves its inputs only, and its backward pass computes the weights again, so that memory is linear in
the length. The weights of short sequences take a few times the memory of the inputs; saving them is faster, because the
backward pass then has four products instead of five.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sigattn.ops.autocast import without_autocast
from sigattn.ops.autograd import is_intercepted, needs_op
from sigattn.ops.cpu import blocked, short
from sigattn.ops.cpu.tiles import arithmetic
from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.problem import UNLIMITED, Problem

MOST = 4  # times the memory of query, key and value: the weights that are saved at most
_BY_AUTOGRAD_UP_TO = 1 << 16  # weights up to which autograd's own nodes cost less than a Function written in Python
_NUM_TENSORS = 10  # leading fields of a problem


def apply_to(problem: Problem) -> bool:
    """Return True if the weights of a differentiated call may be saved, and saving them is faster.

    It is not for calls that are compiled, exported, transformed or intercepted by a dispatch mode, nor where saved
    tensors are intercepted, as in ``torch.utils.checkpoint``, which should not keep the weights.
    """
    tensors = [t for t in problem[:_NUM_TENSORS] if t is not None]
    if is_intercepted(tensors) or are_intercepted() or problem.mask_table is not None:
        return False
    return problem.query.device.type == "cpu" and _fit(problem, arithmetic(problem)[0])


def _fit(problem: Problem, dtype: torch.dtype) -> bool:
    """Return True if weights of a dtype take at most ``MOST`` times the memory of query, key and value."""
    p = problem
    (batch, heads, n, d), (_, key_heads, m, dv) = p.query.shape, p.value.shape
    if (p.left != UNLIMITED or p.right != UNLIMITED) and n * m > short.WHOLE_UP_TO:
        return False
    inputs = heads * n * d + key_heads * m * (d + dv)
    return batch > 0 and heads * n * m * dtype.itemsize <= MOST * inputs * p.query.dtype.itemsize


def are_intercepted() -> bool:
    """Return True where tensors that are saved for the backward pass are replaced or moved by hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def attention(problem: Problem) -> Tensor:  # (B, Hq, N, Dv)
    """Return the output of sigmoid attention, differentiable; the weights are saved."""
    out: Tensor = _Saved.apply(*problem)
    return out


def self_attention(query: Tensor, key: Tensor, value: Tensor, bias: float, scale: float, right: int) -> Tensor | None:
    """Return ``attention`` of plain self-attention, (B, H, N, D), with little overhead; None if weights do not fit."""
    batch, heads, n, d = query.shape
    if n > MOST * 3 * d or (right != UNLIMITED and n * n > short.WHOLE_UP_TO) or are_intercepted():
        return None
    out: Tensor
    if batch * heads * n * n <= _BY_AUTOGRAD_UP_TO:
        return short.formula(short.self_attention_operands(query, key, value, bias, scale, right)).view(query.shape)
    out = _SavedSelfAttention.apply(query, key, value, bias, scale, right)
    return out


class _Saved(Function):
    @staticmethod
    def forward(ctx: Any, *fields: Any) -> Tensor:
        weights: list[Tensor] = []
        with without_autocast("cpu"):
            out = blocked.forward(Problem(*fields), weights)
        ctx.save_for_backward(*fields[:_NUM_TENSORS], *weights)
        ctx.numbers = fields[_NUM_TENSORS:]
        ctx.onednn = torch._C._get_mkldnn_enabled()
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors, weights = saved[:_NUM_TENSORS], saved[_NUM_TENSORS:]
        problem = Problem(*tensors, *ctx.numbers)
        needs_grad = NeedsGrad(*ctx.needs_input_grad[: len(NeedsGrad._fields)])
        if needs_op(grad_out, *tensors):
            gradients = _by_op(problem, grad_out, needs_grad)
        else:
            # oneDNN determines the dtype and the tiles of the weights (``arithmetic``)
            usable = ctx.onednn == torch._C._get_mkldnn_enabled()
            with without_autocast("cpu"):
                gradients = blocked.backward(problem, grad_out, needs_grad, weights if usable else None)
        return (*gradients, *(None,) * (len(problem) - len(gradients)))


class _SavedSelfAttention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: float, scale: float, right: int) -> Tensor:
        weights: list[Tensor] = []
        out = short.compute(short.self_attention_operands(query, key, value, bias, scale, right), weights)
        ctx.save_for_backward(query, key, value, *weights)
        ctx.numbers = bias, scale, right
        return short.unsafe_view(out, query.shape)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *weights = ctx.saved_tensors
        needs_grad = NeedsGrad(*ctx.needs_input_grad[:3])
        bias, scale, right = ctx.numbers
        if needs_op(grad_out, query, key, value):
            number = torch.full((), bias, dtype=torch.float64)
            problem = Problem(query, key, value, number, scale=scale, right=right)
            return (*_by_op(problem, grad_out, needs_grad)[:3], None, None, None)
        o = short.self_attention_operands(query, key, value, bias, scale, right)
        with without_autocast("cpu"):
            gradients = short.differentiate(o, grad_out.reshape(o.query.shape), needs_grad, weights)
        return (*(None if g is None else g.view(query.shape) for g in gradients[:3]), None, None, None)


def _by_op(problem: Problem, grad_out: Tensor, needs_grad: NeedsGrad) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.sigattn.dense_backward(grad_out, *problem, "blocked", list(needs_grad))
    return tuple(g if needed else None for g, needed in zip(gradients, needs_grad, strict=True))
