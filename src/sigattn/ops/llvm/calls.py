"""Calls of backend "llvm": a problem as arguments of the kernels, with copies where a tensor's layout needs them.

llvmlite is imported when they are compiled, at the first call of a dtype.
"""

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.ops import normalization
from sigattn.ops.dropout import column_hashes, keep_scale, row_hashes, threshold
from sigattn.ops.gradients import Gradients, NeedsGrad, Prepared, Result, Saved
from sigattn.ops.llvm.arguments import FORWARD_ROWS, KernelArguments, Strided
from sigattn.ops.llvm.plan import make_plan, round_up
from sigattn.ops.problem import Problem, keep_memory_warm, new_result

MAX_SAVED = 3  # times the memory of query, key and value: the largest weights that are saved
NO_GRADIENT_OF_MASK = "it does not compute the gradient of attn_mask, as 'blocked' does"
# Up to this size in bytes, all memory of a call is one allocation (saves 2 µs for each other one). Larger memory is
# allocated in pieces: glibc would return one big block to the system after every call.
_ONE_ALLOCATION = 4 << 20
# offsets of fields that others point to, as tensors of one number
_BIAS_VALUE: int = KernelArguments.bias_value.offset
_M: int = KernelArguments.m.offset
_ZERO: int = KernelArguments.zero.offset
_HAS_SMALL_SUM: int = KernelArguments.has_small_sum.offset
# fields of the tensors that a pass is given
_PROBLEM = ("query", "key", "value", "bias", "mask", "slopes", "lengths")
_GRADIENTS = ("grad_query", "grad_key", "grad_value")
_FORWARD = (*_PROBLEM, "out", "weights", "weight_sums")
_BACKWARD = (*_PROBLEM, "grad_out", "weights", "row_terms", *_GRADIENTS)

# LLVM compiles in one thread at a time. A fork waits for it, because the child would inherit the locks of LLVM and
# llvmlite as they are. Reentrant for a fork in a signal handler of the thread that compiles.
_compilation = threading.RLock()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(
        before=_compilation.acquire, after_in_parent=_compilation.release, after_in_child=_compilation.release
    )


def saved_weights(p: Problem) -> Saved | None:
    """Return shape and dtype of the weights to save, (B, Hq, N, tiles of M), or None if they are not saved.

    Saved weights spare the backward pass one of five products; with more memory, its page faults would cost more.
    """
    (batch, heads, n, d), (_, key_heads, m, dv) = p.query.shape, p.value.shape
    tile = kernels(p.query.dtype).tile
    columns = -(-m // tile) * tile
    inputs = heads * n * d + key_heads * m * (d + dv)
    if p.seed is not None or not batch * m or heads * n * columns > MAX_SAVED * inputs:
        return None
    return (batch, heads, n, columns), p.query.dtype


def forward(
    p: Problem, saved: Saved | None, prepared: Prepared, result: Result | None = None, lifts: Tensor | None = None
) -> Result:
    """Return the output of sigmoid attention, (B, Hq, N, Dv), and what the backward pass needs (in ``result``).

    prepared: the arguments of an earlier pass with the same signature, if there was one. lifts: those of the rows,
    (B, Hq, N), which the bias contains; None to find them.
    """
    if result is None:
        result = new_result(p.query, p.value.shape[3], p.normalize, saved)
    if not result.out.numel() or not p.key.shape[2]:
        result.out.zero_()
        result.row_sums.zero_()
        return result
    (batch, heads, n, _), kv_heads = p.query.shape, p.key.shape[1]
    call, is_new = _Call.of(prepared, p, result.weights.numel() > 0, _FORWARD, (*p[:7], *result))
    if is_new:
        call.set_operands(query=p.query, key=p.key, value=p.value)
        call.set_result("out", result.out)
        if result.weights.numel():
            call.args.saves = 1
            call.set("weights", result.weights)
        if p.normalize:
            call.args.normalizes = 1
            call.set("weight_sums", result.row_sums.contiguous())  # those of a packed sequence are not
    call.allocate(call.plan.forward)
    if not call.args.packs_keys:
        call.kernels.run("pack", batch * kv_heads, call.args, call.plan.threads)
    call.kernels.run("forward", batch * heads * -(-n // FORWARD_ROWS), call.args, call.plan.threads)
    call.copy_results(out=result.out, weight_sums=result.row_sums)
    has_small_sum = call.finish(prepared)
    if lifts is not None:
        result.row_sums[..., 1] = lifts
    elif has_small_sum and (lifts := normalization.find_lifts(p, result.row_sums)) is not None:
        forward(normalization.lifted(p, lifts), None, {}, result, lifts)
    return result


def backward(
    p: Problem, grad_out: Tensor, result: Result, needs_grad: NeedsGrad, prepared: Prepared
) -> Gradients:  # fmt: skip
    """Return the gradients in ``needs_grad``, from the saved weights; empty ones are computed again."""
    if needs_grad.attn_mask:
        raise RuntimeError(f"sigmoid_attention: backend 'llvm': {NO_GRADIENT_OF_MASK}")
    if not grad_out.numel() or not p.key.shape[2]:
        wanted = zip(p[:6], needs_grad, strict=True)
        return Gradients(*[torch.zeros_like(t) if t is not None and is_needed else None for t, is_needed in wanted])
    (batch, heads, n, _), kv_heads = p.query.shape, p.key.shape[1]
    problem, row_terms = p, None
    if p.normalize:
        problem, grad_out, row_terms = normalization.backward_operands(p, grad_out, result)
    prepared = prepared if problem is p else {}
    grads = [torch.empty_like(t) for t in (p.query, p.key, p.value)]
    tensors = (*problem[:7], grad_out, result.weights, row_terms, *grads)
    call, is_new = _Call.of(prepared, problem, result.weights.numel() > 0, _BACKWARD, tensors)
    splits, part_size = call.args.splits, call.args.part_size
    score_sums = query_sums = None
    if needs_grad.bias or needs_grad.alibi_slopes:
        score_sums = p.query.new_zeros((splits, batch, heads, n, 3), dtype=torch.float32)
        call.args.score_sums_size = 1 if p.alibi_slopes is None else 3
        call.args.score_sums = score_sums.data_ptr()
    if splits > 1:  # each has its own gradient of a part of the queries
        query_sums = p.query.new_empty((splits, batch, heads, part_size, call.args.head_dim), dtype=torch.float32)
        call.args.grad_query_sums = query_sums.data_ptr()
    if is_new:
        call.set_operands(query=p.query, key=p.key, value=p.value, grad_out=grad_out)
        if result.weights.numel():
            call.args.saves = 1
            call.set("weights", result.weights)
        if row_terms is not None:
            call.set("row_terms", row_terms, *row_terms.stride()[:3])
        for name, grad in zip(_GRADIENTS, grads, strict=True):
            call.set_result(name, grad)
    call.allocate(call.plan.backward)
    for first in range(0, n, part_size):
        call.args.first_query = first
        call.kernels.run("backward", batch * kv_heads * splits, call.args, call.plan.threads)
        if query_sums is not None:
            part = call.own.get("grad_query", grads[0])[:, :, first : first + part_size]
            part.copy_(query_sums[..., : part.shape[2], :].sum(0))
    call.copy_results(**dict(zip(_GRADIENTS, grads, strict=True)))
    call.finish(prepared)
    query, key, value = (t if is_needed else None for t, is_needed in zip(grads, needs_grad[:3], strict=True))
    if score_sums is None:
        return Gradients(query, key, value, None, None, None)
    bias = _sum_like(score_sums[..., :1], p.bias) if needs_grad.bias else None
    slopes = _sum_like(-score_sums[..., 1:].sum(3), p.alibi_slopes) if needs_grad.alibi_slopes else None
    return Gradients(query, key, value, bias, None, slopes)


def differentiate(p: Problem, grad_out: Tensor, result: Result, gradients: Gradients) -> None:
    """Write the gradients of query, key and value, and add those of bias and slopes."""
    found = backward(p, grad_out, result, NeedsGrad(*(g is not None for g in gradients)), {})
    for i, (memory, gradient) in enumerate(zip(gradients, found, strict=True)):
        if memory is not None and gradient is not None:
            memory.copy_(gradient) if i < 3 else memory.add_(gradient)


def _sum_like(t: Tensor, like: Tensor | None) -> Tensor | None:
    """Sum over splits of keys, and over the dimensions in which a tensor has size 1, in its dtype."""
    return None if like is None else t.sum(0).sum_to_size(like.shape).to(like.dtype)


class _Call:
    """Arguments of the kernels for a pass of a problem, not empty; used again if they point to no copies of tensors."""

    @classmethod
    def of(
        cls, prepared: Prepared, p: Problem, saves: bool, names: Sequence[str], tensors: Sequence[Tensor | None]
    ) -> tuple["_Call", bool]:
        """Return the arguments for tensors by the names of their fields, and if the tensors are still to be set.

        saves: True with saved weights, which are not a part of the signature of a forward pass.
        Those of an earlier pass are taken, so that no other thread finds them before ``finish``.
        """
        call: _Call | None = prepared.pop(saves, None)
        if call is None:
            return cls(p, dict(zip(names, tensors, strict=True))), True
        for word, i in call._addresses:
            call._words[word] = tensors[i].data_ptr()  # type: ignore[union-attr]
        return call, False

    def __init__(self, p: Problem, given: dict[str, Tensor | None]) -> None:
        self.kernels = kernels(p.query.dtype)
        self.plan = make_plan(
            self.kernels, torch.get_num_threads(), p.query.shape, p.value.shape, p.scale, p.left, p.right,
            p.query_offset,
        )  # fmt: skip
        self.args = KernelArguments.from_buffer_copy(self.plan.args)
        address = ctypes.addressof(self.args)
        self.args.bias.data, self.args.lengths = address + _BIAS_VALUE, address + _M
        self.args.row_terms.data, self.args.small_sum = address + _ZERO, address + _HAS_SMALL_SUM
        self._given = given
        self._words = (ctypes.c_int64 * (ctypes.sizeof(self.args) // 8)).from_buffer(self.args)
        self._addresses: list[tuple[int, int]] = []  # words of the arguments, and indices of the given tensors
        self.own: dict[str, Tensor] = {}  # copies of given tensors, and others that must outlive the pass
        self._memory: list[Tensor] = []
        if p.bias is not None or p.key_lengths is not None or p.normalize:
            self._set_bias(p)
        if p.key_lengths is not None:
            self.set("lengths", p.key_lengths.to(torch.int64))
            self.args.lengths_batch_stride = 1
        if p.alibi_slopes is not None:
            slopes = p.alibi_slopes.float().contiguous()
            self.set("slopes", slopes)
            self.args.alibi, self.args.slopes_batch_stride = 1, slopes.stride(0) if slopes.shape[0] > 1 else 0
        if p.attn_mask is not None:
            self._set_mask(p, p.attn_mask)
        if p.seed is not None:
            self._set_dropout(p, p.seed)

    def finish(self, prepared: Prepared) -> bool:
        """Keep the arguments for the next pass; return True if the pass has found a small sum."""
        has_small_sum, self.args.has_small_sum = bool(self.args.has_small_sum), 0
        self._memory.clear()
        if not self.own:
            self._given.clear()
            prepared[bool(self.args.saves)] = self
        return has_small_sum

    def copy_results(self, **results: Tensor) -> None:
        """Copy results that were not written themselves."""
        for name, result in results.items():
            if name in self.own:
                result.copy_(self.own[name][..., : result.shape[-1]])

    def set(self, name: str, tensor: Tensor, *strides: int) -> None:
        """Set the address and the strides of a tensor: of a given one, a view of it, or a copy."""
        address, given = tensor.data_ptr(), self._given.get(name)
        setattr(self.args, name, Strided(address, *strides) if strides else address)
        if given is None or given.data_ptr() != address:
            self.own[name] = tensor
        else:
            self._addresses.append((getattr(KernelArguments, name).offset // 8, list(self._given).index(name)))

    def set_operands(self, **operands: Tensor) -> None:
        """Set tensors that the kernels read, copied unless their rows are contiguous, and whole vectors of words."""
        per_word, multiple = self.kernels.per_word, self.kernels.multiple
        for name, tensor in operands.items():
            if missing := -tensor.shape[-1] % multiple:
                tensor = F.pad(tensor, (0, missing))
            elif tensor.stride(-1) != 1:
                tensor = tensor.contiguous()
            b, h, n, _ = tensor.stride()
            if per_word == 2 and ((b | h | n) % 2 or tensor.data_ptr() % 4):
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                b, h, n, _ = tensor.stride()
            self.set(name, tensor, b // per_word, h // per_word, n // per_word)

    def set_result(self, name: str, result: Tensor) -> None:
        """Set the tensor to write: the result, or another whose rows are contiguous, and whole vectors."""
        if missing := -result.shape[-1] % self.kernels.multiple:
            result = result.new_empty(*result.shape[:-1], result.shape[-1] + missing)
        elif result.stride(-1) != 1:
            result = result.new_empty(result.shape)
        self.set(name, result, *result.stride()[:3])

    def allocate(self, sizes: dict[str, int]) -> None:
        """Set the fields of a pass's memory to uninitialised memory."""
        is_small = sum(sizes.values()) <= _ONE_ALLOCATION
        for piece in [sizes] if is_small else [{name: size} for name, size in sizes.items()]:
            self._memory.append(torch.empty(sum(piece.values()), dtype=torch.uint8, device="cpu"))
            address = self._memory[-1].data_ptr()
            for name, size in piece.items():
                setattr(self.args, name, address)
                address += size

    def _set_bias(self, p: Problem) -> None:
        bias = p.bias_value()
        if isinstance(bias, Tensor):
            bias = bias.float()
            sizes, strides = bias.shape[:3], bias.stride()[:3]
            self.set("bias", bias, *[0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)])
        else:
            self.args.bias_value = bias

    def _set_mask(self, p: Problem, mask: Tensor) -> None:
        """Set a mask of bool or float32, copied unless its rows are contiguous and a multiple of a tile."""
        m = p.key.shape[2]
        for dim in range(3):  # an expanded mask is not copied in the expanded size
            mask = mask if mask.stride(dim) else mask.narrow(dim, 0, 1)
        mask = mask.expand(*mask.shape[:3], m)
        if mask.dtype is not torch.bool:
            mask = mask.float()
        missing = -m % self.kernels.tile
        mask = F.pad(mask, (0, missing)) if missing else mask
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        self.args.mask_itemsize = mask.itemsize
        strides = mask.expand(*p.query.shape[:3], mask.shape[3]).stride()[:3]
        self.set("mask", mask, *(mask.itemsize * stride for stride in strides))

    def _set_dropout(self, p: Problem, seed: Tensor) -> None:
        device = p.query.device  # not the default device, which may be another
        heads = torch.arange(p.query.shape[0] * p.query.shape[1], device=device) + p.first_head
        rows = torch.arange(p.query.shape[2], device=device) + p.query_offset
        columns = torch.arange(round_up(p.key.shape[2], self.kernels.tile), device=device)
        self.args.dropout, self.args.keep_from = 1, threshold(p.dropout_p)
        self.args.keep_scale = keep_scale(p.dropout_p)
        self.set("row_hashes", row_hashes(seed, heads, rows))
        self.set("column_hashes", column_hashes(seed, columns))


class Kernels:
    """Compiled kernels of sigmoid attention (``kernels.NAMES``) for tensors of one dtype."""

    def __init__(self, per_word: int) -> None:
        from sigattn.ops.llvm.compilation import compile_kernels

        keep_memory_warm()
        self._jit, self._addresses, registers = compile_kernels(per_word)
        self.per_word = per_word  # elements of a tensor in a word of 32 bits
        self.multiple: int = per_word * registers.lanes  # elements of a tensor in a vector
        self.rows: int = registers.rows  # of a microtile
        self.tile: int = registers.tile  # columns of a tile
        self._parallel: Any = parallel()

    def run(self, name: str, tasks: int, args: KernelArguments, threads: int) -> None:
        """Run a kernel on at most as many threads as there are tasks."""
        args.counter, args.workers, args.tasks = 0, 0, tasks
        self._parallel(self._addresses[name], ctypes.addressof(args), min(threads, tasks), 0)


@functools.cache
def parallel() -> Any:
    """Return the function that runs a kernel on PyTorch's threads; None if its OpenMP has not GNU's entry point.

    It takes the address of the kernel, that of its arguments, the number of threads, and 0. PyTorch's wheels for Linux
    and macOS have it, that for Windows does not. Only Linux has been tried.
    """
    paths = [] if sys.platform == "win32" else [None, str(Path(torch.__file__).parent / "lib" / "libomp.dylib")]
    for path in paths:
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.restype, function.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        return function
    return None


_compiled: dict[torch.dtype, Kernels] = {}


def kernels(dtype: torch.dtype) -> Kernels:
    """Return the kernels for tensors of a dtype on this machine, compiled once in a process."""
    if dtype not in _compiled:
        with _compilation:
            if dtype not in _compiled:
                _compiled[dtype] = Kernels(4 // dtype.itemsize)
    return _compiled[dtype]
