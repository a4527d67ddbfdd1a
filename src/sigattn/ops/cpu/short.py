"""Sigmoid attention of short sequences without masks on a CPU, with one batched product for many heads.

The weights of a head fit into a tile of ``cpu.blocked``; as many heads as fit are computed at a time, with no
operations other than the products and the sigmoid. A window, and thus causal attention, is supported.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sigattn.ops.cpu.matmul import Fused, fused_unavailable, keep_memory_warm
from sigattn.ops.cpu.tiles import FUSED_FROM, TILE_BYTES, WIDE_UP_TO, arithmetic
from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.problem import UNLIMITED, Problem


class Operands(NamedTuple):
    """Operands of batched products; G samples and key heads, R queries of all query heads that share a key head."""

    query: Tensor  # (G, R, D)
    key: Tensor  # (G, M, D)
    value: Tensor  # (G, M, Dv)
    bias: Tensor  # (1, 1, 1) or (G, R, 1)
    beta: float  # factor of the bias: a number b is passed as b · 1, so that it is not rounded to the dtype
    scale: float

    def part(self, group: slice) -> Operands:
        """Return the operands of some of the samples and key heads."""
        bias = self.bias if len(self.bias) == 1 else self.bias[group]
        return self._replace(query=self.query[group], key=self.key[group], value=self.value[group], bias=bias)


def plan(problem: Problem) -> torch.dtype | None:
    """Return the dtype to compute in, or None if this module does not apply.

    It applies on a CPU, without masks other than a window, if the weights of a key head's query heads fit into a tile
    and are too few for the fused product.
    """
    p = problem
    if p.attn_mask is not None or p.alibi_slopes is not None or p.key_lengths is not None or p.seed is not None:
        return None
    if p.softcap or p.mask_table is not None:
        return None
    _, heads, n, d = p.query.shape
    _, key_heads, m, _ = p.key.shape
    if p.query.device.type != "cpu" or p.query_offset or not (len(p.query) and key_heads and n and m and d):
        return None
    dtype, products = arithmetic(p)
    if dtype is torch.bfloat16 and p.bias is not None and p.bias.dim():
        return None  # a tensor would be rounded to bfloat16 before the product
    fits = heads // key_heads * n * m * dtype.itemsize <= TILE_BYTES
    return dtype if fits and products is not Fused else None


def fast_path(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, bias: float | None
) -> Tensor | None:
    """Return the self-attention of short plain tensors, or None if this fast path does not apply (saves 25 µs).

    It does not apply to calls that are differentiated, traced, transformed or intercepted by a dispatch mode, nor to
    invalid arguments, for which the general path raises.
    """
    tensors = (query, key, value)
    if torch.compiler.is_compiling() or torch._C._is_tracing() or not all(type(t) is Tensor for t in tensors):
        return None
    if any(t.is_nested or t.layout is not torch.strided or t.device.type != "cpu" for t in tensors):
        return None
    dtype, shape = query.dtype, query.shape
    if len(shape) != 4 or not (shape == key.shape == value.shape) or not (dtype is key.dtype is value.dtype):
        return None
    batch, heads, n, d = shape
    fits = batch * heads * n * n * dtype.itemsize <= TILE_BYTES and n * n < FUSED_FROM.get(dtype, 0) and query.numel()
    if not fits or (dtype is not torch.float32 and (n * n <= WIDE_UP_TO or fused_unavailable(query.device, dtype))):
        return None
    if (scale is not None and not (type(scale) is float and scale == scale)) or (
        bias is not None and type(bias) is not float
    ):
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return None
    if forward_ad._current_level >= 0 or torch.is_autocast_enabled("cpu"):
        return None
    keep_memory_warm()
    q, k, v = (t.reshape(batch * heads, n, d) for t in tensors)
    b, alpha = -math.log(n) if bias is None else bias, d**-0.5 if scale is None else scale
    weights = torch.baddbmm(_one(dtype), q, k.mT, beta=b, alpha=alpha).sigmoid_()  # (B · H, N, N)
    if is_causal:
        weights.tril_()
    return torch.bmm(weights, v).view(shape)


def forward(problem: Problem, dtype: torch.dtype) -> Tensor:  # (B, Hq, N, Dv)
    """Return the output of sigmoid attention, computed in ``dtype``."""
    p = problem
    outs = [torch.bmm(_weights(o, p), o.value) for o in _parts(_operands(p, dtype))]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return _to_dtype(out, p.query.dtype).view(*p.query.shape[:3], -1)


def backward(problem: Problem, dtype: torch.dtype, grad_out: Tensor, needs_grad: NeedsGrad) -> Gradients:
    """Return the gradients in ``needs_grad``, computed in ``dtype``."""
    p = problem
    o = _operands(p, dtype)
    grad = _to_dtype(grad_out, dtype).reshape(*o.query.shape[:2], grad_out.shape[-1])  # (G, R, Dv)
    size = _group_size(o)
    parts = [_backward(o, g, p, needs_grad) for o, g in zip(_parts(o), grad.split(size), strict=True)]
    query, key, value, bias = parts[0] if len(parts) == 1 else map(_cat, zip(*parts, strict=True))
    return Gradients(
        _restore(query, p.query),
        _restore(key, p.key),
        _restore(value, p.value),
        None if bias is None or p.bias is None else _of_bias(bias, p.query, p.bias),
        None,
        None,
    )


def _to_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype is dtype else t.to(dtype)


def _operands(p: Problem, dtype: torch.dtype) -> Operands:
    keep_memory_warm()
    batch, key_heads, m, d = p.key.shape
    group = batch * key_heads
    bias: float | Tensor = p.bias_value()
    if isinstance(bias, Tensor):
        beta, bias = 1.0, bias.to(dtype).expand(*p.query.shape[:3], 1).reshape(group, -1, 1)
    else:
        beta, bias = bias, _one(dtype)
    return Operands(
        _to_dtype(p.query, dtype).reshape(group, -1, d),
        _to_dtype(p.key, dtype).reshape(group, m, d),
        _to_dtype(p.value, dtype).reshape(group, m, -1),
        bias,
        beta,
        p.scale_value,
    )


@functools.cache
def _one(dtype: torch.dtype) -> Tensor:
    """Return a cached one (1, 1, 1), because creating it takes as long as a small product."""
    return torch.ones(1, 1, 1, dtype=dtype, device="cpu")


def _group_size(o: Operands) -> int:
    """Return the number of key heads whose weights fit into a tile."""
    return max(1, TILE_BYTES // o.query.element_size() // (o.query.shape[1] * o.key.shape[1]))


def _parts(o: Operands) -> list[Operands]:
    size = _group_size(o)
    return [o] if size >= len(o.query) else [o.part(slice(g, g + size)) for g in range(0, len(o.query), size)]


def _weights(o: Operands, p: Problem) -> Tensor:  # (G, R, M)
    weights = torch.baddbmm(o.bias, o.query, o.key.mT, beta=o.beta, alpha=o.scale).sigmoid_()
    if p.left == UNLIMITED and p.right == UNLIMITED:
        return weights
    by_head = weights.view(-1, p.query.shape[2], weights.shape[2])  # (query heads, N, M)
    if p.right != UNLIMITED:
        by_head.tril_(p.right)
    if p.left != UNLIMITED:
        by_head.triu_(-p.left)
    return weights


def _backward(o: Operands, grad: Tensor, p: Problem, needs_grad: NeedsGrad) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and, for each query, bias; None if not needed."""
    weights = _weights(o, p)  # (G, R, M)
    value = torch.bmm(weights.mT, grad) if needs_grad.value else None
    if not (needs_grad.query or needs_grad.key or needs_grad.bias):
        return None, None, value, None
    d = torch.bmm(grad, o.value.mT)
    torch.ops.aten.sigmoid_backward.grad_input(d, weights, grad_input=d)  # dS = dP ∘ P ∘ (1 − P), in one pass
    zero = _one(d.dtype)  # beta = 0: not read
    query = torch.baddbmm(zero, d, o.key, beta=0, alpha=o.scale) if needs_grad.query else None
    key = torch.baddbmm(zero, d.mT, o.query, beta=0, alpha=o.scale) if needs_grad.key else None
    bias = d.sum(-1, dtype=torch.promote_types(d.dtype, torch.float32)) if needs_grad.bias else None
    return query, key, value, bias


def _cat(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    return None if parts[0] is None else torch.cat([t for t in parts if t is not None])


def _restore(t: Tensor | None, like: Tensor) -> Tensor | None:
    return t if t is None else t.to(like.dtype).view(like.shape)


def _of_bias(per_query: Tensor, query: Tensor, bias: Tensor) -> Tensor:
    """Sum the gradient of the bias over the dimensions in which it broadcasts: (G, R) → the bias's shape."""
    return per_query.view(*query.shape[:3], 1).sum_to_size(bias.shape).to(bias.dtype)
