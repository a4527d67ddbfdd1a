"""Collectives for tensors whose shapes differ between processes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup


class Transfer:
    """Asynchronous transfer of tensors to one process and from another.

    Args:
        sent: tensors to send to ``dst``. received: output tensors for those of ``src``, of the same shapes as those.
        dst, src: ranks within the group.
    """

    def __init__(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], dst: int, src: int, group: ProcessGroup
    ) -> None:
        self.received = received
        self._sent = [t.contiguous() for t in sent]  # an attribute, so that the memory is kept during the transfer
        ranks = dist.get_process_group_ranks(group)
        operations = [dist.P2POp(dist.isend, t, ranks[dst], group) for t in self._sent if t.numel()]
        operations += [dist.P2POp(dist.irecv, t, ranks[src], group) for t in received if t.numel()]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Sequence[Tensor]:
        """Wait and return the received tensors; raise RuntimeError if the other process ended, or after the timeout."""
        for work in self._works:
            work.wait()
        return self.received


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
