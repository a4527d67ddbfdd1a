"""Calls of backend "llvm": a problem as arguments of the kernels, with copies where a tensor's layout needs them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.ops.dropout import column_hashes, row_hashes, threshold
from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.llvm.kernels import ANYWHERE, FIELDS, FORWARD_ROWS, INDEX
from sigattn.ops.llvm.launch import Kernels, float_bits, kernels
from sigattn.ops.problem import UNLIMITED, Problem, new_output


class Arguments:
    """Arguments of a kernel (``kernels.FIELDS``), and copies of tensors that must outlive its call.

    Args:
        compiled: the kernels that take them.
    """

    def __init__(self, compiled: Kernels) -> None:
        self.word, self.tile = compiled.word, compiled.registers.tile
        self.multiple = self.word * compiled.registers.lanes  # numbers of a tensor in a vector
        self.data = (ctypes.c_int64 * len(FIELDS))()
        self._kept: list[Tensor] = []

    def set(self, name: str, *values: int) -> None:
        """Set the fields from ``name`` on."""
        index = INDEX[name]
        self.data[index : index + len(values)] = list(values)

    def set_field_as_tensor(self, name: str, field: str) -> None:
        """Let a tensor be one number, the value of a field, with strides of 0."""
        self.set(name, ctypes.addressof(self.data) + 8 * INDEX[field])

    def new(self, name: str, like: Tensor, *shape: int) -> None:
        """Set a field to memory of a shape."""
        memory = like.new_empty(shape)
        self._kept.append(memory)
        self.set(name, memory.data_ptr())

    def new_pairs(self, name: str, like: Tensor, heads: int, rows: int) -> None:
        """Set a field to memory for pairs of rows."""
        self.new(name, like, heads, _round_up(rows, 2), _round_up(like.shape[-1], self.multiple))

    def new_sums(self, name: str, result: Tensor, parts: int = 1) -> Tensor:
        """Set a field to memory for the sums of a result, of each part of the keys if it is that of the queries."""
        sums = result.new_empty(parts if name == "grad_query" else 1, *result.shape, dtype=torch.float32)
        self.keep(f"{name}_sums", sums)
        return sums

    def set_operand(self, name: str, tensor: Tensor) -> None:
        """Set a tensor to read, copied unless its rows are contiguous and whole vectors of words."""
        if missing := -tensor.shape[-1] % self.multiple:
            tensor = F.pad(tensor, (0, missing))
        elif tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
        if self.word == 1:
            return self.keep(name, tensor, *tensor.stride()[:3])
        if tensor.data_ptr() % 4 or any(stride % 2 for stride in tensor.stride()[:3]):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return self.keep(name, tensor, *(stride // 2 for stride in tensor.stride()[:3]))

    def set_weights(self, weights: Tensor) -> None:
        """Let the kernels save the weights, or read them."""
        self.set("saves", 1)
        self.keep("weights", weights)

    def keep(self, name: str, tensor: Tensor, *strides: int) -> None:
        """Set a tensor's address and strides."""
        self._kept.append(tensor)
        self.set(name, tensor.data_ptr(), *strides)

    def set_result(self, name: str, result: Tensor) -> Tensor:
        """Set a result and return it, or if its rows are not contiguous or whole vectors, a larger tensor instead."""
        if result.shape[-1] % self.multiple or result.stride(-1) != 1:
            result = result.new_empty(*result.shape[:-1], _round_up(result.shape[-1], self.multiple))
        self.set(name, result.data_ptr(), *result.stride()[:3])
        return result


def forward(problem: Problem, saved: list[Tensor] | None = None) -> Tensor:  # (B, Hq, N, Dv)
    """Return the output of sigmoid attention; append the weights to ``saved``, for ``backward``."""
    p = problem
    (batch, heads, n, _), (_, kv, m, dv) = p.query.shape, p.value.shape
    result = new_output(p.query, dv)
    if not result.numel() or not m:
        return result.zero_()
    compiled, arguments = _plan(p)
    out = arguments.set_result("out", result)
    if arguments.word == 2:
        arguments.new_pairs("value_pairs", p.value, batch * kv, m)
        arguments.new_sums("out", out)
    if saved is not None:
        saved.append(p.query.new_empty(batch, heads, n, _round_up(m, arguments.tile)))
        arguments.set_weights(saved[0])
    blocks = -(-n // FORWARD_ROWS)
    if blocks == 1 and heads == kv:
        arguments.set("packs", 1)
    else:
        compiled.run("pack", batch * kv, arguments.data)
    compiled.run("forward", batch * heads * blocks, arguments.data)
    return _copied(out, result)


def backward(
    problem: Problem, grad_out: Tensor, needs_grad: NeedsGrad, saved: Sequence[Tensor] | None = None
) -> Gradients:
    """Return the gradients in ``needs_grad``.

    Args:
        saved: what ``forward`` has saved; None computes the weights again.
    """
    p = problem
    (batch, heads, n, _), (_, kv, m, dv) = p.query.shape, p.value.shape
    sums = needs_grad.bias or needs_grad.alibi_slopes
    results = [torch.empty_like(t) for t in (p.query, p.key, p.value)]
    row_sums = p.query.new_zeros((1, batch, heads, n, 3), dtype=torch.float32) if sums else None
    if not grad_out.numel() or not m:
        for t in results:
            t.zero_()
    else:
        compiled, arguments = _plan(p)
        arguments.new("values", p.query, batch, kv, _round_up(m, arguments.tile), _round_up(dv, arguments.multiple))
        parts = _number_of_parts(batch * kv, -(-m // arguments.tile))
        arguments.set("parts", parts)
        if row_sums is not None:
            row_sums = row_sums.expand(parts, -1, -1, -1, -1).contiguous()
            arguments.set("row_sums", row_sums.data_ptr())
            arguments.set("sums", 1 if p.alibi_slopes is None else 3)
        arguments.set_operand("grad_out", grad_out)
        if saved:
            arguments.set_weights(saved[0])
        names = ("grad_query", "grad_key", "grad_value")
        targets = [arguments.set_result(name, t) for name, t in zip(names, results, strict=True)]
        if arguments.word == 2:
            for name, tensor in (("query_pairs", p.query), ("grad_pairs", grad_out)):
                arguments.new_pairs(name, tensor, batch * heads, n)
            arguments.new_pairs("key_pairs", p.key, batch * kv, m)
            partial, *_ = [arguments.new_sums(name, t, parts) for name, t in zip(names, targets, strict=True)]
            compiled.run("pair_queries", batch * heads, arguments.data)
        elif parts > 1:
            partial = p.query.new_empty(parts, *targets[0].shape)
            arguments.set("grad_query", partial.data_ptr(), *partial.stride()[1:4], partial.stride(0))
        compiled.run("backward", batch * kv * parts, arguments.data)
        if parts > 1:
            targets[0].copy_(partial.sum(0))
        results = [_copied(target, result) for target, result in zip(targets, results, strict=True)]
    query, key, value = (t if needed else None for t, needed in zip(results, needs_grad[:3], strict=True))
    if row_sums is None:
        return Gradients(query, key, value, None, None, None)
    bias = _sum_like(row_sums[..., :1], p.bias) if needs_grad.bias else None
    slopes = _sum_like(-row_sums[..., 1:].sum(3), p.alibi_slopes) if needs_grad.alibi_slopes else None
    return Gradients(query, key, value, bias, None, slopes)


def _number_of_parts(key_heads: int, tiles: int) -> int:
    """Return into how many parts the keys of a head are divided, so that the threads finish at about the same time.

    Each part has its own gradient of the queries; these are added. So there are no more than needed.

    Args:
        key_heads: number of heads of all samples. tiles: number of tiles of keys of a head.
    """
    threads = torch.get_num_threads()
    if key_heads % threads == 0 or key_heads >= 4 * threads:
        return 1
    return max(1, min(-(-4 * threads // key_heads), max(threads // key_heads, 8), tiles))


def _sum_like(t: Tensor, like: Tensor | None) -> Tensor | None:
    """Sum over parts of keys, and over the dimensions in which a tensor has size 1, in its dtype."""
    return None if like is None else t.sum(0).sum_to_size(like.shape).to(like.dtype)


def _copied(out: Tensor, result: Tensor) -> Tensor:
    """Return a result that was computed in ``out``."""
    return result if out is result else result.copy_(out[..., : result.shape[-1]])


def _plan(problem: Problem) -> tuple[Kernels, Arguments]:
    """Return the kernels, and the arguments that both passes take."""
    p, compiled = problem, kernels(problem.query.dtype)
    (batch, heads, n, d), (_, kv, m, dv) = p.query.shape, p.value.shape
    arguments = Arguments(compiled)
    sizes = _round_up(d, arguments.multiple), _round_up(dv, arguments.multiple)
    left, right = (ANYWHERE if side == UNLIMITED else side for side in (p.left, p.right))
    arguments.set("scale", float_bits(p.scale_value), heads, heads // kv, n, m, *sizes, left, right, p.query_offset)
    for name, tensor in (("query", p.query), ("key", p.key), ("value", p.value)):
        arguments.set_operand(name, tensor)
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
        _set_dropout(arguments, p, p.seed, _round_up(m, arguments.tile))
    arguments.new("keys", p.query, batch, kv, _round_up(m, arguments.tile), sizes[0])
    return compiled, arguments


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


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
