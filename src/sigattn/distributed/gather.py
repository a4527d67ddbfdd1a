"""Differentiable all-gather of the rows of all ranks, for contrastive losses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist


def gather(rows: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all ranks in order, and the index of this rank's first row.

    Ranks may hold different numbers of rows. The gradient of a rank's rows is summed over all ranks.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows, 0
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    sizes = [int(c) for c in counts]
    start = sum(sizes[: dist.get_rank()])
    return _Gather.apply(rows, sizes), start


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sizes):  # type: ignore[no-untyped-def]
        ctx.sizes = sizes
        longest = max(sizes)
        padded = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([p[:n] for p, n in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        start = sum(ctx.sizes[: dist.get_rank()])
        return grad[start : start + ctx.sizes[dist.get_rank()]], None
