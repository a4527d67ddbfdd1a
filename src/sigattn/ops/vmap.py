"""Rules of ``torch.vmap``: calls for each slice, or for the dense operator one call with a larger batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from sigattn.ops.gradients import Result
from sigattn.ops.problem import Problem

# called with the op, the number of slices, the mapped dimension of each argument, and the arguments
Rule = Callable[[OpOverload, int, Sequence[int | None], Sequence[Any]], tuple[Any, Any]]
_FOLDED = 7  # query, key, value, bias, attn_mask, alibi_slopes and key_lengths have a batch dimension


def by_slices(op: OpOverload, size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> tuple[Any, Any]:
    """Apply an op to each slice and stack the results."""
    slices = []
    for i in range(size):
        pairs = zip(args, in_dims, strict=True)
        slices.append(op(*(a.select(d, i) if isinstance(a, Tensor) and d is not None else a for a, d in pairs)))
    return tuple(torch.stack(s) for s in zip(*slices, strict=True)), (0,) * len(slices[0])


def dense_forward(op: OpOverload, size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> tuple[Any, Any]:
    """Merge the mapped dimension into the batch of the dense operator, if all slices may be one problem."""
    *problem, backend, save = args
    if not _may_fold(problem, in_dims[:-2]):
        return by_slices(op, size, in_dims, args)
    folded = _fold_batches(size, in_dims, problem)
    return _unfold(size, op(*folded, *problem[_FOLDED:], backend, save))


def dense_backward(op: OpOverload, size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> tuple[Any, Any]:
    """Merge the mapped dimension into the batch, unless gradients are summed over the batch (bias, mask, slopes)."""
    first = 1 + len(Result._fields)
    grad_out, out, weights, row_sums, *problem, backend, needs_grad = args
    if not _may_fold(problem, in_dims[first:-2]) or any(needs_grad[3:]):
        return by_slices(op, size, in_dims, args)
    folded = _fold_batches(size, in_dims[first:], problem)
    batch = len(folded[0]) // size
    (grad_out,) = _fold_batches(size, in_dims[:1], [grad_out], batch=batch)
    if row_sums.numel():
        out, row_sums = _fold_batches(size, (in_dims[1], in_dims[3]), [out, row_sums], batch=batch)
    else:  # they are mapped, as an empty tensor for each slice
        out = row_sums = row_sums.new_empty(0)
    if weights.numel() and in_dims[2] is not None:
        (weights,) = _fold_batches(size, in_dims[2:3], [weights], batch=batch)
    else:  # those of all slices together would take more memory than computing them again
        weights = weights.new_empty(0)
    return _unfold(size, op(grad_out, out, weights, row_sums, *folded, *problem[_FOLDED:], backend, needs_grad))


def _unfold(size: int, results: Sequence[Tensor]) -> tuple[Any, Any]:
    """Return results of one call as those of each slice; an empty tensor stands for none."""
    split = (t.unflatten(0, (size, -1)) if t.dim() > 1 else t.expand(size, 0) for t in results)
    return tuple(split), (0,) * len(results)


def _may_fold(args: Sequence[Any], in_dims: Sequence[int | None]) -> bool:
    """Return False if slices must drop the same weights with one seed, or with block masks or biases by slice."""
    p, dims = Problem(*args), Problem(*in_dims)  # type: ignore[arg-type]
    bias_is_number = dims.bias is not None and p.bias is not None and p.bias.dim() == 1
    return p.seed is None and p.mask_table is None and not bias_is_number


def _fold_batches(size: int, in_dims: Sequence[int | None], args: Sequence[Any], batch: int | None = None) -> list[Any]:
    """Merge the mapped dimension into the batch, size · B, of the leading tensors, unless they broadcast along both."""
    if batch is None:
        batch = args[0].shape[0 if in_dims[0] != 0 else 1]
    folded: list[Any] = []
    for name, t, d in zip(Problem._fields[:_FOLDED], args, in_dims, strict=False):
        may_broadcast = name in ("bias", "attn_mask", "alibi_slopes")
        if t is None or (d is None and may_broadcast and (t.dim() == 0 or t.shape[0] == 1)):
            folded.append(t)
            continue
        t = t.unsqueeze(0) if d is None else t.movedim(d, 0)  # (size or 1, B or 1, …)
        folded.append(t.expand(size, batch, *t.shape[2:]).reshape(size * batch, *t.shape[2:]))
    return folded
