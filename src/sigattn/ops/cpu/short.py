"""Sigmoid attention of short sequences without masks on a CPU, with one batched product for many heads.

The weights of a head fit into a tile of ``cpu.blocked``; as many heads as fit are computed at a time, with no
operations other than the products and the sigmoid. A window, and thus causal attention, is supported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sigattn.ops.cpu.matmul import Extended, Fused, fused_unavailable, keep_memory_warm, scratch
from sigattn.ops.cpu.tiles import FUSED_FROM, TILE_BYTES, WIDE_UP_TO, arithmetic, heads_together
from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.problem import UNLIMITED, Problem

WHOLE_UP_TO = 540**2  # weights per head; with more, tiles outside a window are skipped

# reshapes a contiguous temporary; autograd refuses to change the output of a Function in place if it is a view
unsafe_view = torch.ops.aten._unsafe_view.default

_SMALL = 1 << 18  # bytes of weights that fit into the processor's caches, wherever they are


class Operands(NamedTuple):
    """Operands of batched products; G samples and key heads, R queries of all query heads that share a key head."""

    query: Tensor  # (G, R, D)
    key: Tensor  # (G, M, D)
    value: Tensor  # (G, M, Dv)
    bias: Tensor  # (1, 1, 1) or (G, R, 1)
    beta: float  # factor of the bias: a number b is passed as b · 1, so that it is not rounded to the dtype
    scale: float
    length: int  # N, of which R is a multiple
    left: int  # the window
    right: int
    extended: tuple[Tensor, Tensor] | None = None  # query and key whose product has the bias and the scale in it
    sum_dtype: torch.dtype = torch.float32  # of the bias's gradient for each query

    def groups(self, size: int) -> Iterator[tuple[Operands, slice]]:
        """Yield the operands of ``size`` samples and key heads at a time, and their indices."""
        for start in range(0, len(self.query), size):
            g = slice(start, start + size)
            bias = self.bias if len(self.bias) == 1 else self.bias[g]
            part = self._replace(query=self.query[g], key=self.key[g], value=self.value[g], bias=bias)
            if self.extended is not None:
                part = part._replace(extended=(self.extended[0][g], self.extended[1][g]))
            yield part, g


def plan(problem: Problem) -> torch.dtype | None:
    """Return the dtype to compute in, or None if this module does not apply.

    It applies on a CPU, without masks other than a window, if the weights of a key head's query heads fit into a tile
    and are too few for the fused product.
    """
    p = problem
    if p.attn_mask is not None or p.alibi_slopes is not None or p.key_lengths is not None or p.seed is not None:
        return None
    if p.softcap or p.mask_table is not None or p.scale == 0:  # oneDNN computes no product with alpha = 0, nor its bias
        return None
    _, heads, n, d = p.query.shape
    _, key_heads, m, _ = p.key.shape
    if p.query.device.type != "cpu" or p.query_offset or not (len(p.query) and key_heads and n and m and d):
        return None
    dtype, products = arithmetic(p)
    fits = heads // key_heads * n * m * dtype.itemsize <= TILE_BYTES
    if (p.left != UNLIMITED or p.right != UNLIMITED) and n * m > WHOLE_UP_TO:
        return None  # skipping tiles is faster
    return dtype if fits and products is not Fused else None


def is_plain_self_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None, bias: float | None) -> bool:
    """Return True for tensors on a CPU that are neither traced nor intercepted, of one shape (B, H, N, D) and dtype.

    Calls with such arguments need no validation; other arguments, also invalid ones, take the general path.
    """
    tensors = (query, key, value)
    if torch.compiler.is_compiling() or torch._C._is_tracing() or not all(type(t) is Tensor for t in tensors):
        return False
    if any(t.is_nested or t.layout is not torch.strided or t.device.type != "cpu" for t in tensors):
        return False
    dtype, shape = query.dtype, query.shape
    if len(shape) != 4 or not (shape == key.shape == value.shape) or not (dtype is key.dtype is value.dtype):
        return False
    n = shape[2]
    if not query.numel() or (
        dtype is not torch.float32 and (n * n <= WIDE_UP_TO or fused_unavailable(query.device, dtype))
    ):
        return False
    if scale is not None and (type(scale) is not float or scale != scale or scale == 0):  # for 0 see ``plan``
        return False
    if bias is not None and type(bias) is not float:
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return False
    return not (forward_ad._current_level >= 0 or torch.is_autocast_enabled("cpu"))


def self_attention_operands(
    query: Tensor, key: Tensor, value: Tensor, bias: float, scale: float, right: int
) -> Operands:
    """Return the operands of plain self-attention, each (B, H, N, D)."""
    n, d = query.shape[2:]
    q, k, v = query.reshape(-1, n, d), key.reshape(-1, n, d), value.reshape(-1, n, d)
    return Operands(q, k, v, _one(query.dtype), bias, scale, n, UNLIMITED, right)


def fast_path(query: Tensor, key: Tensor, value: Tensor, bias: float, scale: float, right: int) -> Tensor | None:
    """Return plain self-attention that is not differentiated, (B, H, N, D), or None if it does not fit a tile.

    Without validation and dispatch, a call takes 25 µs less.
    """
    batch, heads, n, d = query.shape
    if batch * heads * n * n * query.itemsize > TILE_BYTES or n * n >= FUSED_FROM.get(query.dtype, 0):
        return None
    if batch * heads * n * n * query.itemsize >= _SMALL:
        keep_memory_warm()
        return compute(self_attention_operands(query, key, value, bias, scale, right)).view(query.shape)
    q, k, v = query.reshape(-1, n, d), key.reshape(-1, n, d), value.reshape(-1, n, d)
    weights = torch.baddbmm(_one(query.dtype), q, k.mT, beta=bias, alpha=scale).sigmoid_()
    if right != UNLIMITED:
        weights.tril_(right)
    return torch.bmm(weights, v).view(query.shape)


def formula(o: Operands) -> Tensor:  # (G, R, Dv)
    """Return the output in operations that autograd differentiates itself."""
    logits = torch.baddbmm(o.bias, o.query, o.key.mT, beta=o.beta, alpha=o.scale)
    if o.right != UNLIMITED:  # before the sigmoid, whose derivative of a masked NaN would be NaN
        logits.masked_fill_(_hidden(*logits.shape[1:], o.right), -math.inf)
    return torch.bmm(logits.sigmoid_(), o.value)


@functools.lru_cache(maxsize=64)
def _hidden(rows: int, columns: int, right: int) -> Tensor:  # (rows, columns)
    """Return which keys are more than ``right`` after the query."""
    return torch.ones(rows, columns, dtype=torch.bool, device="cpu").triu(right + 1)


def forward(problem: Problem, dtype: torch.dtype, saved: list[Tensor] | None = None) -> Tensor:  # (B, Hq, N, Dv)
    """Return the output of sigmoid attention, computed in ``dtype``; append the weights to ``saved``."""
    out = _to_dtype(compute(_operands(problem, dtype), saved), problem.query.dtype)
    return unsafe_view(out, (*problem.query.shape[:3], problem.value.shape[3]))


def backward(
    problem: Problem,
    dtype: torch.dtype,
    grad_out: Tensor,
    needs_grad: NeedsGrad,
    saved: Sequence[Tensor] | None = None,
) -> Gradients:
    """Return the gradients in ``needs_grad``, computed in ``dtype``, from the weights that ``forward`` has saved."""
    p, o = problem, _operands(problem, dtype)
    grad_out = _to_dtype(grad_out, dtype).reshape(*o.query.shape[:2], grad_out.shape[-1])  # (G, R, Dv)
    query, key, value, bias = differentiate(o, grad_out, needs_grad, saved)
    return Gradients(
        _restore(query, p.query),
        _restore(key, p.key),
        _restore(value, p.value),
        None if bias is None or p.bias is None else _of_bias(bias, p.query, p.bias),
        None,
        None,
    )


def compute(o: Operands, saved: list[Tensor] | None = None) -> Tensor:  # (G, R, Dv)
    """Return the output; append the weights of each group of heads to ``saved``."""
    size = _group_size(o)
    buffer = None if saved is not None else _buffer("logits", o, size)
    if size >= len(o.query):
        weights = _weights(o, buffer)
        if saved is not None:
            saved.append(weights)
        return torch.bmm(weights, o.value)
    out = o.query.new_empty(*o.query.shape[:2], o.value.shape[-1])
    for part, group in o.groups(size):
        weights = _weights(part, buffer)
        torch.bmm(weights, part.value, out=out[group])
        if saved is not None:
            saved.append(weights)
    return out


def differentiate(
    o: Operands, grad_out: Tensor, needs_grad: NeedsGrad, saved: Sequence[Tensor] | None = None
) -> tuple[Tensor | None, ...]:  # grad_out: (G, R, Dv)
    """Return the gradients of query, key and value, and for each query (G, R) that of the bias; None if not needed."""
    size = _group_size(o)
    buffer, d = None if saved is not None else _buffer("logits", o, size), _buffer("outer", o, size)
    if size >= len(o.query):
        return _differentiate(o, grad_out, needs_grad, _weights(o, buffer) if saved is None else saved[0], d=d)
    # contiguous, which the compiler expects, whatever the order of the operands in memory
    gradients = [t.new_empty(t.shape) if needed else None for t, needed in zip(o[:3], needs_grad[:3], strict=True)]
    gradients.append(o.query.new_empty(o.query.shape[:2], dtype=o.sum_dtype) if needs_grad.bias else None)
    for i, (part, group) in enumerate(o.groups(size)):
        weights = _weights(part, buffer) if saved is None else saved[i]
        query, key, value, bias = (None if t is None else t[group] for t in gradients)
        _differentiate(part, grad_out[group], needs_grad, weights, query, key, value, bias, d)
    return tuple(gradients)


def _differentiate(
    o: Operands,
    grad_out: Tensor,
    needs_grad: NeedsGrad,
    weights: Tensor,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    d: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of one group of heads, written into the given tensors; d is a buffer like the weights."""
    if needs_grad.value:
        value = torch.bmm(weights.mT, grad_out, out=value)
    if needs_grad.query or needs_grad.key or needs_grad.bias:
        d = torch.bmm(grad_out, o.value.mT, out=None if d is None else d[: len(weights)])
        torch.ops.aten.sigmoid_backward.grad_input(d, weights, grad_input=d)  # dS = dP ∘ P ∘ (1 − P), in one pass
        zero = _one(d.dtype)  # beta = 0: not read
        if needs_grad.query:
            query = torch.baddbmm(zero, d, o.key, beta=0, alpha=o.scale, out=query)
        if needs_grad.key:
            key = torch.baddbmm(zero, d.mT, o.query, beta=0, alpha=o.scale, out=key)
        if needs_grad.bias:
            bias = torch.sum(d, -1, dtype=o.sum_dtype, out=bias)
    return query, key, value, bias


def _to_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype is dtype else t.to(dtype)


def _operands(p: Problem, dtype: torch.dtype) -> Operands:
    keep_memory_warm()
    batch, key_heads, m, d = p.key.shape
    group = batch * key_heads
    query = _to_dtype(p.query, dtype).reshape(group, -1, d)
    key = _to_dtype(p.key, dtype).reshape(group, m, d)
    value = _to_dtype(p.value, dtype).reshape(group, m, -1)
    wide = torch.promote_types(dtype, torch.float32)
    window = p.query.shape[2], p.left, p.right
    bias: float | Tensor = p.bias_value()
    if not isinstance(bias, Tensor):
        return Operands(query, key, value, _one(dtype), bias, p.scale_value, *window, None, wide)
    bias = bias.to(wide).expand(*p.query.shape[:3], 1).reshape(group, -1, 1)
    if dtype is wide:
        return Operands(query, key, value, bias, 1.0, p.scale_value, *window, None, wide)
    # the bias as an operand of baddbmm would be rounded; its gradient's sums over keys may be, if nothing adds them up
    extended = Extended(query.unsqueeze(1), key, bias.unsqueeze(1), p.scale_value)
    per_query = p.bias is not None and p.bias.shape == (*p.query.shape[:3], 1)
    operands = extended.query.squeeze(1), extended.key
    return Operands(query, key, value, _one(dtype), 0.0, p.scale_value, *window, operands, dtype if per_query else wide)


@functools.cache
def _one(dtype: torch.dtype) -> Tensor:
    """Return a cached one (1, 1, 1), because creating it takes as long as a small product."""
    return torch.ones(1, 1, 1, dtype=dtype, device="cpu")


def _group_size(o: Operands) -> int:
    """Return the number of samples and key heads that are computed at a time, in groups of nearly the same size."""
    most = max(1, TILE_BYTES // o.query.element_size() // (o.query.shape[1] * o.key.shape[1]))
    return heads_together(len(o.query), most)


def _buffer(name: str, o: Operands, size: int) -> Tensor | None:  # (G, R, M)
    """Return memory for the weights of a group of heads, unless they are so few that allocating it is fast."""
    shape = min(size, len(o.query)), o.query.shape[1], o.key.shape[1]
    if math.prod(shape) * o.query.itemsize < _SMALL:
        return None
    return scratch(o.query.device).tile(name, o.query, *shape)


def _weights(o: Operands, buffer: Tensor | None = None) -> Tensor:  # (G, R, M)
    out = None if buffer is None else buffer[: len(o.query)]
    if o.extended is not None:
        weights = torch.bmm(o.extended[0], o.extended[1].mT, out=out).sigmoid_()
    else:
        weights = torch.baddbmm(o.bias, o.query, o.key.mT, beta=o.beta, alpha=o.scale, out=out).sigmoid_()
    if o.left == UNLIMITED and o.right == UNLIMITED:
        return weights
    by_head = weights.view(-1, o.length, weights.shape[2])  # (query heads, N, M)
    if o.right != UNLIMITED:
        by_head.tril_(o.right)
    if o.left != UNLIMITED:
        by_head.triu_(-o.left)
    return weights


def _restore(t: Tensor | None, like: Tensor) -> Tensor | None:
    return t if t is None else t.to(like.dtype).view(like.shape)


def _of_bias(per_query: Tensor, query: Tensor, bias: Tensor) -> Tensor:
    """Sum the gradient of the bias over the dimensions in which it broadcasts: (G, R) → the bias's shape."""
    return per_query.view(*query.shape[:3], 1).sum_to_size(bias.shape).to(bias.dtype)
