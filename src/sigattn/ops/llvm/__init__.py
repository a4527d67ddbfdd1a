"""Backend "llvm": kernels for a CPU's vector units, compiled at their first call by llvmlite, without a C compiler."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.ops.dropout import column_hashes, row_hashes, threshold
from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.problem import UNLIMITED, Problem, new_output

if TYPE_CHECKING:
    from sigattn.ops.llvm.launch import Kernels

_INSTALLED = importlib.util.find_spec("llvmlite") is not None
_PROCESSOR = torch.cpu.get_capabilities()
# Zen 4 (AMD's processors with AVX-512, without AVX-VNNI): nearly always faster than PyTorch's products (docs/log.md)
_MEASURED = bool(_PROCESSOR.get("sse4a") and _PROCESSOR.get("avx512_f") and not _PROCESSOR.get("avx_vnni"))
_HAS_THREADS = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "GOMP_parallel")


def can_be_default() -> bool:
    """Return True on processors on which the kernels were measured, unless the call is recorded for other machines."""
    recorded = torch.compiler.is_exporting() if torch.compiler.is_compiling() else torch._C._is_tracing()
    return _MEASURED and not recorded


def unavailable(problem: Problem) -> str | None:
    """Return why the kernels do not support a problem, or None."""
    p = problem
    if p.query.device.type != "cpu":
        return f"it is for CPUs, not for {p.query.device.type}"
    if not _HAS_THREADS:
        return "it needs Linux, and a PyTorch that uses OpenMP"
    if not _INSTALLED:
        return "it needs llvmlite, which is not installed (pip install 'sigattn[cpu]')"
    if p.query.dtype != torch.float32:
        return f"it is for float32, not for {str(p.query.dtype).removeprefix('torch.')}"
    if p.attn_mask is None and p.mask_table is None and not p.softcap:
        return None
    given = {"attn_mask": p.attn_mask, "a BlockMask": p.mask_table, "softcap": p.softcap or None}
    return f"it does not support {' and '.join(name for name, value in given.items() if value is not None)}"


def forward(problem: Problem) -> Tensor:  # (B, Hq, N, Dv)
    """Return the output of sigmoid attention."""
    from sigattn.ops.llvm.kernels import FORWARD_ROWS

    p = problem
    (batch, heads, n, _), (_, kv, m, dv) = p.query.shape, p.value.shape
    result = new_output(p.query, dv)
    if not result.numel() or not m:
        return result.zero_()
    kernels, arguments = _plan(p)
    out = arguments.set_result("out", result)
    blocks = -(-n // FORWARD_ROWS)
    if blocks == 1 and heads == kv:
        arguments.set("packs", 1)
    else:
        kernels.run("pack", batch * kv, arguments)
    kernels.run("forward", batch * heads * blocks, arguments)
    return _copied(out, result)


def backward(problem: Problem, grad_out: Tensor, needs_grad: NeedsGrad) -> Gradients:
    """Return the gradients in ``needs_grad``."""
    p = problem
    (batch, heads, n, _), (_, kv, m, dv) = p.query.shape, p.value.shape
    sums = needs_grad.bias or needs_grad.alibi_slopes
    results = [torch.empty_like(t) for t in (p.query, p.key, p.value)]
    row_sums = p.query.new_zeros(1, batch, heads, n, 3) if sums else None
    if not grad_out.numel() or not m:
        for t in results:
            t.zero_()
    else:
        kernels, arguments = _plan(p)
        arguments.new("values", p.query, batch, kv, _round_up(m, arguments.tile), _round_up(dv, arguments.lanes))
        parts = _number_of_parts(batch * kv, -(-m // arguments.tile))
        arguments.set("parts", parts)
        if row_sums is not None:
            row_sums = row_sums.expand(parts, -1, -1, -1, -1).contiguous()
            arguments.set("row_sums", row_sums.data_ptr())
            arguments.set("sums", 1 if p.alibi_slopes is None else 3)
        arguments.set_operand("grad_out", grad_out)
        names = ("grad_query", "grad_key", "grad_value")
        targets = [arguments.set_result(name, t) for name, t in zip(names, results, strict=True)]
        if parts > 1:
            partial = p.query.new_empty(parts, *targets[0].shape)
            arguments.set("grad_query", partial.data_ptr(), *partial.stride()[1:4], partial.stride(0))
        kernels.run("backward", batch * kv * parts, arguments)
        if parts > 1:
            torch.sum(partial, 0, out=targets[0])
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


class Arguments:
    """Arguments of a kernel (``kernels.FIELDS``), and copies of tensors that must outlive its call.

    Args:
        lanes: numbers in a vector. tile: keys of a microtile.
    """

    def __init__(self, lanes: int, tile: int) -> None:
        from sigattn.ops.llvm.kernels import FIELDS, INDEX

        self.lanes, self.tile = lanes, tile
        self.data = (ctypes.c_int64 * len(FIELDS))()
        self._index = INDEX
        self._kept: list[Tensor] = []

    def set(self, name: str, *values: int) -> None:
        """Set the fields from ``name`` on."""
        index = self._index[name]
        self.data[index : index + len(values)] = list(values)

    def set_field_as_tensor(self, name: str, field: str) -> None:
        """Let a tensor be one number, the value of a field, with strides of 0."""
        self.set(name, ctypes.addressof(self.data) + 8 * self._index[field])

    def new(self, name: str, like: Tensor, *shape: int) -> None:
        """Set a field to memory of a shape."""
        memory = like.new_empty(shape)
        self._kept.append(memory)
        self.set(name, memory.data_ptr())

    def set_operand(self, name: str, tensor: Tensor) -> None:
        """Set a tensor, copied unless its rows are contiguous and whole vectors."""
        if missing := -tensor.shape[-1] % self.lanes:
            tensor = F.pad(tensor, (0, missing))
        elif tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
        self.keep(name, tensor, *tensor.stride()[:3])

    def keep(self, name: str, tensor: Tensor, *strides: int) -> None:
        """Set a tensor's address and strides."""
        self._kept.append(tensor)
        self.set(name, tensor.data_ptr(), *strides)

    def set_result(self, name: str, result: Tensor) -> Tensor:
        """Set a result and return it, or if its rows are not contiguous or whole vectors, a larger tensor instead."""
        if result.shape[-1] % self.lanes or result.stride(-1) != 1:
            result = result.new_empty(*result.shape[:-1], _round_up(result.shape[-1], self.lanes))
        self.set(name, result.data_ptr(), *result.stride()[:3])
        return result


def _copied(out: Tensor, result: Tensor) -> Tensor:
    """Return a result that was computed in ``out``."""
    return result if out is result else result.copy_(out[..., : result.shape[-1]])


def _plan(problem: Problem) -> tuple[Kernels, Arguments]:
    """Return the kernels, and the arguments that both passes take."""
    from sigattn.ops.llvm.kernels import ANYWHERE
    from sigattn.ops.llvm.launch import float_bits, kernels

    p, compiled = problem, kernels()
    (batch, heads, n, d), (_, kv, m, dv) = p.query.shape, p.value.shape
    lanes, tile = compiled.registers.lanes, compiled.registers.tile
    arguments = Arguments(lanes, tile)
    sizes = _round_up(d, lanes), _round_up(dv, lanes)
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
    if p.seed is not None:
        _set_dropout(arguments, p, p.seed, _round_up(m, tile))
    arguments.new("keys", p.query, batch, kv, _round_up(m, tile), sizes[0])
    return compiled, arguments


def _set_dropout(arguments: Arguments, p: Problem, seed: Tensor, columns: int) -> None:
    from sigattn.ops.llvm.launch import float_bits

    heads = torch.arange(p.query.shape[0] * p.query.shape[1]) + p.first_head
    rows = torch.arange(p.query.shape[2]) + p.query_offset
    arguments.set("dropout", 1, threshold(p.dropout_p), float_bits(p.keep_scale))
    arguments.keep("row_hashes", row_hashes(seed, heads, rows))
    arguments.keep("column_hashes", column_hashes(seed, torch.arange(columns)))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
