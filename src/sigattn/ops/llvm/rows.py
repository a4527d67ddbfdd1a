"""Functions of rows by kernels of backend "llvm": the scale of rows, and a quadratic form of them.

Arguments and results are those of ``sigattn.ops.rows``, which has the formulas in operators of PyTorch.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from sigattn.ops.llvm import row_kernels
from sigattn.ops.llvm.arguments import readable
from sigattn.ops.llvm.launch import Compiled, compilation, registers
from sigattn.ops.llvm.row_kernels import INDEX, ROWS, number_of_sums
from sigattn.ops.row_constants import MAX_DIRECTIONS

_Fields = ctypes.c_int64 * len(row_kernels.FIELDS)
_ONE_THREAD = 1 << 16  # numbers of a tensor for which one thread is faster than waking another


def scale(output: Tensor, gain: Tensor, power: Tensor, direction: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the scaled rows, their factors, ‖o‖ and w · o/‖o‖, the latter (B, H, N, 1), in float32."""
    scaled = _empty_like(output)
    factor, norm, cosine = output.new_empty((3, *output.shape[:3], 1), dtype=torch.float32).unbind()
    arrays = {"gain": gain, "power": power, "direction": direction, "factor": factor, "norm": norm, "cosine": cosine}
    _run("scale", output, scaled, arrays)
    return scaled, factor, norm, cosine


def scale_backward(
    grad_scaled: Tensor,
    grad_factor: Tensor,
    output: Tensor,
    gain: Tensor,
    power: Tensor,
    direction: Tensor,
    factor: Tensor,
    norm: Tensor,
    cosine: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of output, gain, power and direction."""
    grad = _empty_like(output)
    arrays = {"gain": gain, "power": power, "direction": direction, "factor": factor, "norm": norm, "cosine": cosine}
    sums = _run("scale_backward", output, grad, arrays, grad_scaled, grad_factor)
    assert sums is not None
    width = output.shape[3]
    return grad, sums[:, width], sums[:, width + 1], sums[:, :width].reshape(-1)


def quadratic(query: Tensor, forms: Tensor, curvature: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return the quadratic forms, (B, H, N, 1), and the linear forms of each row, (9, B, H, N), in float32.

    Args:
        forms: (H, 9, D), the directions and the linear term.
    """
    values = query.new_empty((MAX_DIRECTIONS + 1, *query.shape[:3]), dtype=torch.float32)
    term = query.new_empty((*query.shape[:3], 1), dtype=torch.float32)
    arrays = {"forms": forms, "curvature": curvature, "lower": lower, "upper": upper, "values": values, "term": term}
    _run("quadratic", query, None, arrays)
    return term, values


def quadratic_term(query: Tensor, forms: Tensor, curvature: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return the quadratic forms alone, for a call without gradient."""
    term = query.new_empty((*query.shape[:3], 1), dtype=torch.float32)
    arrays = {"forms": forms, "curvature": curvature, "lower": lower, "upper": upper, "term": term}
    _run("quadratic_term", query, None, arrays)
    return term


def quadratic_backward(
    grad_term: Tensor, query: Tensor, forms: Tensor, curvature: Tensor, lower: Tensor, upper: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, forms and curvature."""
    grad = _empty_like(query)
    arrays = {"forms": forms, "curvature": curvature, "lower": lower, "upper": upper, "values": values}
    sums = _run("quadratic_backward", query, grad, arrays, row_grad=grad_term)
    assert sums is not None
    return grad, sums[:, :-MAX_DIRECTIONS].reshape(forms.shape), sums[:, -MAX_DIRECTIONS:].reshape(-1)


@functools.cache
def _compiled(lanes: int, word: int) -> Compiled:
    """Return the kernels, compiled once in a process for a dtype."""
    return Compiled(row_kernels.make_module(lanes, word), row_kernels.NAMES)


def _empty_like(rows: Tensor) -> Tensor:
    """Return an uninitialised tensor in the same memory order, with contiguous rows."""
    like = torch.empty_like(rows)
    return like if like.stride(-1) == 1 else torch.empty_like(rows, memory_format=torch.contiguous_format)


def _run(
    name: str,
    rows: Tensor,
    out: Tensor | None,
    arrays: dict[str, Tensor],
    grad: Tensor | None = None,
    row_grad: Tensor | None = None,
) -> Tensor | None:
    """Run a kernel; return the sums of a backward pass, (H, number of sums).

    Args:
        arrays: float32 arguments. grad, row_grad: arguments of a backward pass.
    """
    lanes, word = registers().lanes, 4 // rows.itemsize
    batch, heads, n, width = rows.shape
    blocks = -(-n // ROWS)  # of a head, and of all samples of a head
    total = batch * blocks
    threads = torch.get_num_threads() if rows.numel() >= _ONE_THREAD else 1
    step = max(1, total // (4 * threads))  # of a task
    parts = -(-total // step)
    tensor, *strides = readable(rows, lanes)
    kept = [tensor]  # until the kernel has run
    numbers = [heads, n, width, blocks, total, step, tensor.data_ptr(), *strides]
    sums = None
    if row_grad is not None:
        arrays["row_grad"] = row_grad
        arrays["sums"] = sums = rows.new_empty((parts, heads, number_of_sums(name, width)), dtype=torch.float32)
    if grad is not None:
        tensor, *strides = readable(grad, lanes)
        kept.append(tensor)
        numbers += [tensor.data_ptr(), *strides]
    else:
        numbers += [0] * 4
    if out is not None:
        numbers += [out.data_ptr(), *out.stride()[:3]]
    data = _Fields(0, 0, *numbers)
    for field, tensor in arrays.items():
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
            kept.append(tensor := tensor.to(torch.float32).contiguous())
        data[INDEX[field]] = tensor.data_ptr()
    with compilation:
        compiled = _compiled(lanes, word)
    compiled.run(name, parts, data, threads)
    return None if sums is None else sums.sum(0)
