"""Collectives for tensors whose shapes differ between processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup


def _start(
    sent: Iterable[tuple[int, Tensor]], received: Iterable[tuple[int, Tensor]], group: ProcessGroup
) -> list[dist.Work]:
    """Start sending and receiving contiguous tensors, each with the rank within the group of the other process."""
    ranks = dist.get_process_group_ranks(group)
    operations = [dist.P2POp(dist.isend, t, ranks[rank], group) for rank, t in sent if t.numel()]
    operations += [dist.P2POp(dist.irecv, t, ranks[rank], group) for rank, t in received if t.numel()]
    return dist.batch_isend_irecv(operations) if operations else []


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
        self._works = _start([(dst, t) for t in self._sent], [(src, t) for t in received], group)

    def wait(self) -> Sequence[Tensor]:
        """Wait and return the received tensors; raise RuntimeError if the other process ended, or after the timeout."""
        for work in self._works:
            work.wait()
        return self.received


def _all_to_all(sent: Sequence[Tensor], received: Sequence[Tensor], group: ProcessGroup) -> None:
    """Send ``sent[r]`` to and receive ``received[r]`` from every other process r."""
    others = [r for r in range(len(sent)) if r != dist.get_rank(group)]
    for work in _start([(r, sent[r]) for r in others], [(r, received[r]) for r in others], group):
        work.wait()


def all_gather(local: Tensor, shapes: Sequence[Sequence[int]], group: ProcessGroup) -> list[Tensor]:
    """Return every process's tensor, by rank, without a copy of the local one. The shapes may differ between ranks."""
    rank, local = dist.get_rank(group), local.contiguous()
    parts = [local if r == rank else local.new_empty(tuple(shape)) for r, shape in enumerate(shapes)]
    _all_to_all([local] * len(shapes), parts, group)
    return parts


def reduce_scatter(parts: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """Return the sum over all processes of ``parts[rank]``, added in the order of ranks, so that it repeats bitwise."""
    rank, sent = dist.get_rank(group), [p.contiguous() for p in parts]
    received = [sent[rank] if r == rank else torch.empty_like(sent[rank]) for r in range(len(parts))]
    _all_to_all(sent, received, group)
    total = received[0].clone()
    for part in received[1:]:
        total += part
    return total


def all_gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all processes in order, and the index of this process's first row.

    Processes may hold different numbers of rows. The gradient of a process's rows is summed over all processes.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows, 0
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    sizes = [int(c) for c in counts]
    return _AllGatherRows.apply(rows, sizes), sum(sizes[: dist.get_rank()])


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        return torch.cat(all_gather(rows, [(n, *rows.shape[1:]) for n in sizes], _world()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad.split(ctx.sizes), _world()), None


def _world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
