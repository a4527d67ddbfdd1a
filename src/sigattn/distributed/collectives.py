"""Differentiable collectives, of tensors whose shapes may differ between processes."""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def all_gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all processes in order, and the index of this process's first row.

    Processes may hold different numbers of rows. The gradient of a process's rows is summed over all processes.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows, 0
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    sizes = [int(c) for c in counts]
    first = sum(sizes[: dist.get_rank()])
    zeros = [rows.new_zeros(n, *rows.shape[1:]) for n in (first, sum(sizes) - first - len(rows))]
    return AllReduceSum.apply(torch.cat([zeros[0], rows, zeros[1]])), first


class AllReduceSum(torch.autograd.Function):
    """Sum over all processes. Each process uses the sum, so the gradient is the sum of the processes' gradients."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return AllReduceSum.apply(grad.contiguous())
