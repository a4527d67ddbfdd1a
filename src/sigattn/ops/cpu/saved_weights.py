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

from sigattn.ops import llvm
from sigattn.ops.autocast import without_autocast
from sigattn.ops.autograd import is_intercepted, needs_op
from sigattn.ops.cpu import blocked, short
from sigattn.ops.cpu.tiles import arithmetic
from sigattn.ops.gradients import NeedsGrad
from sigattn.ops.problem import UNLIMITED, Problem

MOST = 4  # times the memory of query, key and value: the weights that "blocked" saves at most
MOST_OF_LLVM = 3  # with more, the page faults of new memory cost more than a product saves
_LLVM_TILE = 64  # keys up to whose multiple "llvm" saves weights, or to a divisor's multiple
_BY_AUTOGRAD_UP_TO = 1 << 16  # weights up to which autograd's own nodes cost less than a Function written in Python
_NUM_TENSORS = 10  # leading fields of a problem
_BACKENDS: dict[str, Any] = {"blocked": blocked, "llvm": llvm}


def apply_to(problem: Problem, backend: str) -> bool:
    """Return True if the weights of a call that a backend differentiates may be saved, and saving them is faster.

    It is not for calls that are compiled, exported, transformed or intercepted by a dispatch mode, nor where saved
    tensors are intercepted, as in ``torch.utils.checkpoint``, which should not keep the weights.
    """
    if backend not in _BACKENDS or problem.query.device.type != "cpu" or problem.mask_table is not None:
        return False
    if is_intercepted([t for t in problem[:_NUM_TENSORS] if t is not None]) or are_intercepted():
        return False
    n, m = problem.query.shape[2], problem.key.shape[2]
    if backend == "llvm":
        columns = -(-m // _LLVM_TILE) * _LLVM_TILE
        return problem.seed is None and _fit(problem, columns, problem.query.dtype, MOST_OF_LLVM)
    has_window = problem.left != UNLIMITED or problem.right != UNLIMITED
    if has_window and n * m > short.WHOLE_UP_TO:
        return False
    return _fit(problem, m, arithmetic(problem)[0], MOST)


def _fit(problem: Problem, columns: int, dtype: torch.dtype, most: int) -> bool:
    """Return True if rows of weights of a dtype take at most ``most`` times the memory of query, key and value."""
    p = problem
    (batch, heads, n, d), (_, key_heads, m, dv) = p.query.shape, p.value.shape
    inputs = heads * n * d + key_heads * m * (d + dv)
    return batch > 0 and heads * n * columns * dtype.itemsize <= most * inputs * p.query.dtype.itemsize


def are_intercepted() -> bool:
    """Return True where tensors that are saved for the backward pass are replaced or moved by hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def attention(problem: Problem, backend: str) -> Tensor:  # (B, Hq, N, Dv)
    """Return the output of a backend, differentiable; the weights are saved."""
    out: Tensor = _Saved.apply(backend, problem[_NUM_TENSORS:], *problem[:_NUM_TENSORS])
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
    def forward(ctx: Any, backend: str, numbers: tuple[Any, ...], *tensors: Any) -> Tensor:
        weights: list[Tensor] = []
        # below autograd, which would take an output with the query's order of memory for a view
        with without_autocast("cpu"), torch._C._AutoDispatchBelowAutograd():
            out: Tensor = _BACKENDS[backend].forward(Problem(*tensors, *numbers), weights)
        ctx.save_for_backward(*tensors, *weights)
        ctx.backend, ctx.numbers = backend, numbers
        ctx.onednn = torch._C._get_mkldnn_enabled()
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors, weights = saved[:_NUM_TENSORS], saved[_NUM_TENSORS:]
        problem = Problem(*tensors, *ctx.numbers)
        needs_grad = NeedsGrad(*ctx.needs_input_grad[2 : 2 + len(NeedsGrad._fields)])
        if needs_op(grad_out, *tensors):
            gradients = _by_op(problem, grad_out, needs_grad, ctx.backend)
        else:
            # oneDNN determines the dtype and the tiles of the weights of "blocked" (``arithmetic``)
            usable = ctx.backend != "blocked" or ctx.onednn == torch._C._get_mkldnn_enabled()
            with without_autocast("cpu"):
                gradients = _BACKENDS[ctx.backend].backward(problem, grad_out, needs_grad, weights if usable else None)
        return (None, None, *gradients, *(None,) * (_NUM_TENSORS - len(gradients)))


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
            return (*_by_op(problem, grad_out, needs_grad, "blocked")[:3], None, None, None)
        o = short.self_attention_operands(query, key, value, bias, scale, right)
        with without_autocast("cpu"):
            gradients = short.differentiate(o, grad_out.reshape(o.query.shape), needs_grad, weights)
        return (*(None if g is None else g.view(query.shape) for g in gradients[:3]), None, None, None)


def _by_op(problem: Problem, grad_out: Tensor, needs_grad: NeedsGrad, backend: str) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.sigattn.dense_backward(grad_out, *problem, backend, list(needs_grad))
    return tuple(g if needed else None for g, needed in zip(gradients, needs_grad, strict=True))
