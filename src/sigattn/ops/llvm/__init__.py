"""Backend "llvm": kernels for a CPU's vector units, compiled at their first call by llvmlite, without a C compiler."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.problem import UNLIMITED, Problem, new_output

if TYPE_CHECKING:
    from sigattn.ops.llvm.launch import Kernels

_INSTALLED = importlib.util.find_spec("llvmlite") is not None
_HAS_THREADS = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "GOMP_parallel")


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
    given = {"attn_mask": p.attn_mask, "dropout": p.seed, "a BlockMask": p.mask_table, "softcap": p.softcap or None}
    options = [name for name, value in given.items() if value is not None]
    return f"it does not support {' and '.join(options)}" if options else None


def forward(problem: Problem) -> Tensor:  # (B, Hq, N, Dv)
    """Return the output of sigmoid attention."""
    from sigattn.ops.llvm.kernels import FORWARD_ROWS

    p = problem
    (batch, heads, n, _), (_, kv, m, dv) = p.query.shape, p.value.shape
    result = new_output(p.query, dv)
    if not result.numel() or not m:
        return result.zero_()
    kernels, arguments = _plan(p, "forward")
    out = arguments.add_result("out", result)
    kernels.run("pack", batch * kv, arguments)
    kernels.run("forward", batch * heads * -(-n // FORWARD_ROWS), arguments)
    return _copied(out, result)


def backward(problem: Problem, grad_out: Tensor, needs_grad: NeedsGrad) -> Gradients:
    """Return the gradients in ``needs_grad``."""
    p = problem
    (batch, heads, n, _), (_, kv, m, _) = p.query.shape, p.value.shape
    sums = needs_grad.bias or needs_grad.alibi_slopes
    results = [torch.empty_like(t) for t in (p.query, p.key, p.value)]
    row_sums = p.query.new_zeros(1, batch, heads, n, 3)
    if not grad_out.numel() or not m:
        for t in results:
            t.zero_()
    else:
        kernels, arguments = _plan(p, "backward", sums=sums)
        # with fewer key heads than threads, each head's keys are divided, and the partial results added
        parts = max(1, min(torch.get_num_threads() // (batch * kv), -(-m // arguments.tile)))
        row_sums = row_sums.expand(parts, -1, -1, -1, -1).contiguous()
        arguments["parts"] = parts
        arguments.add("row_sums", row_sums, ())
        arguments.add_operand("grad_out", grad_out)
        targets = [
            arguments.add_result(f"grad_{n}", t) for n, t in zip(("query", "key", "value"), results, strict=True)
        ]
        if parts > 1:
            partial = p.query.new_empty(parts, *targets[0].shape)
            arguments.add("grad_query", partial, partial.stride()[1:])
            arguments["grad_query_part"] = partial.stride(0)
        kernels.run("backward", batch * kv * parts, arguments)
        if parts > 1:
            torch.sum(partial, 0, out=targets[0])
        results = [_copied(target, result) for target, result in zip(targets, results, strict=True)]
    query, key, value = (t if needed else None for t, needed in zip(results, needs_grad[:3], strict=True))
    bias = _sum_like(row_sums[..., :1], p.bias) if needs_grad.bias else None
    slopes = _sum_like(-row_sums[..., 1:].sum(3), p.alibi_slopes) if needs_grad.alibi_slopes else None
    return Gradients(query, key, value, bias, None, slopes)


def _sum_like(t: Tensor, like: Tensor | None) -> Tensor | None:
    """Sum over parts of keys, and over the dimensions in which a tensor has size 1, in its dtype."""
    return None if like is None else t.sum(0).sum_to_size(like.shape).to(like.dtype)


class _Arguments(dict[str, int]):
    """Arguments of a kernel, and the tensors that must outlive its call.

    Attributes:
        lanes: numbers in a vector. tile: keys of a microtile.
    """

    def __init__(self, lanes: int, tile: int, **numbers: int) -> None:
        super().__init__(numbers)
        self.lanes, self.tile = lanes, tile
        self._kept: list[Tensor] = []

    def add(self, name: str, tensor: Tensor, strides: tuple[int, ...]) -> None:
        """Add a tensor's address and strides of samples, heads and rows."""
        self._kept.append(tensor)
        self[name] = tensor.data_ptr()
        for axis, stride in zip("bhn", strides, strict=False):
            self[f"{name}_{axis}"] = stride

    def add_operand(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, copied unless its rows are contiguous and whole vectors."""
        if missing := -tensor.shape[-1] % self.lanes:
            tensor = F.pad(tensor, (0, missing))
        elif tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
        self.add(name, tensor, tensor.stride())

    def add_result(self, name: str, result: Tensor) -> Tensor:
        """Add a result and return it, or if its rows are not contiguous or whole vectors, a larger tensor instead."""
        if result.shape[-1] % self.lanes or result.stride(-1) != 1:
            result = result.new_empty(*result.shape[:-1], _round_up(result.shape[-1], self.lanes))
        self.add(name, result, result.stride())
        return result


def _copied(out: Tensor, result: Tensor) -> Tensor:
    """Return a result that was computed in ``out``."""
    return result if out is result else result.copy_(out[..., : result.shape[-1]])


def _plan(problem: Problem, direction: str, *, sums: bool = False) -> tuple[Kernels, _Arguments]:
    """Return the "forward" or "backward" kernels of a problem, and the arguments that both take.

    Args:
        problem: the problem. direction: "forward" or "backward". sums: True for the gradient of bias or slopes.
    """
    from sigattn.ops.llvm import kernels, launch, microtiles

    p, registers = problem, launch.registers()
    (batch, heads, n, d), (_, kv, m, dv) = p.query.shape, p.value.shape
    sizes = _round_up(d, registers.lanes), _round_up(dv, registers.lanes)
    kind = microtiles.Kind(registers, *sizes, p.alibi_slopes is not None, sums)
    arguments = _Arguments(
        registers.lanes,
        registers.tile,
        scale=launch.float_bits(p.scale_value),
        heads=heads,
        repeat=heads // kv,
        n=n,
        m=m,
        left=kernels.ANYWHERE if p.left == UNLIMITED else p.left,
        right=kernels.ANYWHERE if p.right == UNLIMITED else p.right,
        query_offset=p.query_offset,
    )
    for name, tensor in (("query", p.query), ("key", p.key), ("value", p.value)):
        arguments.add_operand(name, tensor)
    b = p.bias_value()
    bias = b.float() if isinstance(b, Tensor) else torch.full((1, 1, 1, 1), b)
    arguments.add("bias", bias, bias.expand(batch, heads, n, 1).stride())
    lengths = torch.full((batch,), m) if p.key_lengths is None else p.key_lengths.to(torch.int64).contiguous()
    arguments.add("lengths", lengths, ())
    if p.alibi_slopes is not None:
        slopes = p.alibi_slopes.float().contiguous()
        arguments.add("slopes", slopes, slopes.expand(batch, heads, 2).stride()[:1])
    packed = ("keys",) if direction == "forward" else ("keys", "values")  # by the kernels
    for name, size in zip(packed, sizes, strict=False):
        arguments.add(name, p.query.new_empty(batch, kv, _round_up(m, registers.tile), size), ())
    return launch.kernels_of(kind, direction), arguments


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
