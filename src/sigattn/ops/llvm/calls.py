"""Calls of backend "llvm": a problem as arguments of the kernels, with copies where a tensor's layout needs them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from sigattn.ops.dropout import column_hashes, row_hashes, threshold
from sigattn.ops.gradients import Gradients, NeedsGrad
from sigattn.ops.llvm.arguments import KernelArguments, Strided
from sigattn.ops.llvm.kernels import FORWARD_ROWS
from sigattn.ops.llvm.launch import kernels
from sigattn.ops.llvm.plan import Memory, make_plan, round_up
from sigattn.ops.problem import Problem, new_output


def forward(p: Problem, save: bool) -> tuple[Tensor, Tensor]:  # (B, Hq, N, Dv), (B, Hq, N, tiles of M)
    """Return the output of sigmoid attention, and the weights if they are to be saved, else an empty tensor."""
    (batch, heads, n, _), (_, kv_heads, m, dv) = p.query.shape, p.value.shape
    out = new_output(p.query, dv)
    if not out.numel() or not m:
        return out.zero_(), p.query.new_empty(0)
    call = _Call(p)
    call.allocate(call.plan.forward)
    target = call.set_result("out", out)
    weights = p.query.new_empty((batch, heads, n, columns_of_weights(p)) if save else 0)
    if save:
        call.set_weights(weights)
    blocks = -(-n // FORWARD_ROWS)
    if blocks == 1 and heads == kv_heads:
        call.args.packs_keys = 1
    else:
        call.run("pack", batch * kv_heads)
    call.run("forward", batch * heads * blocks)
    return _copied(target, out), weights


def backward(p: Problem, grad_out: Tensor, weights: Tensor, needs_grad: NeedsGrad) -> Gradients:
    """Return the gradients in ``needs_grad``, from the saved weights; empty ones are computed again."""
    (batch, heads, n, _), (_, kv_heads, m, _) = p.query.shape, p.value.shape
    grads = [torch.empty_like(t) for t in (p.query, p.key, p.value)]
    needs_row_sums = needs_grad.bias or needs_grad.alibi_slopes
    row_sums = p.query.new_zeros((1, batch, heads, n, 3), dtype=torch.float32) if needs_row_sums else None
    if not grad_out.numel() or not m:
        for grad in grads:
            grad.zero_()
    else:
        call = _Call(p)
        splits = call.plan.splits
        call.allocate(call.plan.backward)
        if row_sums is not None:
            row_sums = row_sums.expand(splits, -1, -1, -1, -1).contiguous()
            call.set("row_sums", row_sums)
            call.args.row_sums_size = 1 if p.alibi_slopes is None else 3
        call.set_operand("grad_out", grad_out)
        if weights.numel():
            call.set_weights(weights)
        names = ("grad_query", "grad_key", "grad_value")
        targets = [call.set_result(name, grad) for name, grad in zip(names, grads, strict=True)]
        if splits > 1:  # each has its own gradient of the queries
            partial = p.query.new_empty((splits, *targets[0].shape), dtype=torch.float32)
            if call.kernels.per_word == 1:
                call.set("grad_query", partial, *partial.stride()[1:4])
                call.args.grad_query_split_stride = partial.stride(0)
            else:
                call.set("grad_query_sums", partial)
        if call.kernels.per_word == 2:
            call.run("pair_queries", batch * heads)
        call.run("backward", batch * kv_heads * splits)
        if splits > 1:
            targets[0].copy_(partial.sum(0))
        grads = [_copied(target, grad) for target, grad in zip(targets, grads, strict=True)]
    query, key, value = (t if is_needed else None for t, is_needed in zip(grads, needs_grad[:3], strict=True))
    if row_sums is None:
        return Gradients(query, key, value, None, None, None)
    bias = _sum_like(row_sums[..., :1], p.bias) if needs_grad.bias else None
    slopes = _sum_like(-row_sums[..., 1:].sum(3), p.alibi_slopes) if needs_grad.alibi_slopes else None
    return Gradients(query, key, value, bias, None, slopes)


def columns_of_weights(p: Problem) -> int:
    """Return the number of columns of saved weights, whole tiles of keys."""
    return round_up(p.key.shape[2], kernels(p.query.dtype).registers.tile)


def _sum_like(t: Tensor, like: Tensor | None) -> Tensor | None:
    """Sum over splits of keys, and over the dimensions in which a tensor has size 1, in its dtype."""
    return None if like is None else t.sum(0).sum_to_size(like.shape).to(like.dtype)


def _copied(target: Tensor, result: Tensor) -> Tensor:
    """Return a result that was computed in ``target``."""
    return result if target is result else result.copy_(target[..., : result.shape[-1]])


class _Call:
    """Arguments of the kernels, those that both passes need, and the tensors that must outlive the call.

    Args:
        p: the problem.
    """

    def __init__(self, p: Problem) -> None:
        self.kernels = kernels(p.query.dtype)
        self.tile = self.kernels.registers.tile
        numbers = p.scale_value, p.left, p.right, p.query_offset
        self.plan = make_plan(self.kernels, torch.get_num_threads(), p.query.shape, p.value.shape, *numbers)
        self.args = KernelArguments.from_buffer_copy(self.plan.args)
        self._tensors: list[Tensor] = []
        for name, operand in (("query", p.query), ("key", p.key), ("value", p.value)):
            self.set_operand(name, operand)
        self._set_bias(p)
        self._set_lengths(p)
        if p.alibi_slopes is not None:
            slopes = p.alibi_slopes.float().contiguous()
            self.set("slopes", slopes)
            self.args.alibi, self.args.slopes_batch_stride = 1, slopes.stride(0) if slopes.shape[0] > 1 else 0
        if p.attn_mask is not None:
            self._set_mask(p, p.attn_mask)
        if p.seed is not None:
            self._set_dropout(p, p.seed)

    def run(self, kernel: str, tasks: int) -> None:
        """Run a kernel."""
        self.kernels.run(kernel, tasks, self.args, self.plan.threads)

    def set(self, name: str, tensor: Tensor, *strides: int) -> None:
        """Set the address and the strides of a tensor."""
        self._tensors.append(tensor)
        setattr(self.args, name, Strided(tensor.data_ptr(), *strides) if strides else tensor.data_ptr())

    def set_operand(self, name: str, tensor: Tensor) -> None:
        """Set a tensor that the kernels read."""
        self.set(name, *_readable(tensor, self.kernels.multiple))

    def set_result(self, name: str, result: Tensor) -> Tensor:
        """Set the tensor that the kernels write, and return it.

        It is the result, or a larger tensor if its rows are not contiguous or not a multiple of a vector.
        """
        if result.shape[-1] % self.kernels.multiple or result.stride(-1) != 1:
            result = result.new_empty(*result.shape[:-1], round_up(result.shape[-1], self.kernels.multiple))
        self.set(name, result, *result.stride()[:3])
        return result

    def set_weights(self, weights: Tensor) -> None:
        """Let the kernels save the weights, or read them."""
        self.args.saves = 1
        self.set("weights", weights)

    def allocate(self, memory: Memory) -> None:
        """Allocate the memory of a pass."""
        self._tensors += memory.allocate(self.args, self._tensors[0])

    def _point(self, field: str) -> int:
        """Return the address of a field of the arguments, which is thus a tensor of one number."""
        offset: int = getattr(KernelArguments, field).offset
        return ctypes.addressof(self.args) + offset

    def _set_bias(self, p: Problem) -> None:
        bias = p.bias_value()
        if isinstance(bias, Tensor):
            bias = bias.float()
            self.set("bias", bias, *bias.expand(*p.query.shape[:3], 1).stride()[:3])
        else:
            self.args.bias_value = bias
            self.args.bias.data = self._point("bias_value")

    def _set_lengths(self, p: Problem) -> None:
        if p.key_lengths is None:
            self.args.lengths = self._point("m")
            return
        # a copy within bounds, because whoever shares the memory of the lengths may change them during the call
        self.set("lengths", p.key_lengths.to(torch.int64).clamp(0, p.key.shape[2]).contiguous())
        self.args.lengths_batch_stride = 1

    def _set_mask(self, p: Problem, mask: Tensor) -> None:
        """Set a mask of bool or float32, copied unless its rows are contiguous and a multiple of a tile."""
        m = p.key.shape[2]
        for dim in range(3):  # an expanded mask is not copied in the expanded size
            mask = mask if mask.stride(dim) else mask.narrow(dim, 0, 1)
        mask = mask.expand(*mask.shape[:3], m)
        if mask.dtype is not torch.bool:
            mask = mask.float()
        missing = -m % self.tile
        mask = F.pad(mask, (0, missing)) if missing else mask
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        self.args.mask_itemsize = mask.itemsize
        strides = mask.expand(*p.query.shape[:3], mask.shape[3]).stride()[:3]
        self.set("mask", mask, *(mask.itemsize * stride for stride in strides))

    def _set_dropout(self, p: Problem, seed: Tensor) -> None:
        device = p.query.device  # not the default device, which may be another
        heads = torch.arange(p.query.shape[0] * p.query.shape[1], device=device) + p.first_head
        rows = torch.arange(p.query.shape[2], device=device) + p.query_offset
        columns = torch.arange(round_up(p.key.shape[2], self.tile), device=device)
        self.args.dropout, self.args.keep_from, self.args.keep_scale = 1, threshold(p.dropout_p), p.keep_scale
        self.set("row_hashes", row_hashes(seed, heads, rows))
        self.set("column_hashes", column_hashes(seed, columns))


def _readable(tensor: Tensor, multiple: int) -> tuple[Tensor, int, int, int]:
    """Return a tensor and its strides in words, copied unless its rows are contiguous and a multiple of a vector."""
    if missing := -tensor.shape[-1] % multiple:
        tensor = F.pad(tensor, (0, missing))
    elif tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    b, h, n, _ = tensor.stride()
    if tensor.itemsize == 4:
        return tensor, b, h, n
    if (b | h | n) % 2 or tensor.data_ptr() % 4:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        b, h, n, _ = tensor.stride()
    return tensor, b // 2, h // 2, n // 2
