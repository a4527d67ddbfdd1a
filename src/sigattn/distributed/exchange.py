"""Tensors from each process to each other one, and how many bytes that took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup


@dataclass
class Traffic:
    """What this process sent.

    Attributes:
        bytes: how much. messages: how often.
    """

    bytes: int = 0
    messages: int = 0


_counting: list[Traffic] = []


@contextmanager
def counting() -> Iterator[Traffic]:
    """Within, what this process sends through this module is counted."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def count(t: Tensor, times: int = 1) -> None:
    """Note that a tensor is sent."""
    for traffic in _counting:
        traffic.bytes += times * t.numel() * t.element_size()
        traffic.messages += times


class Transfer:
    """Tensors under way to one process and from another, while this one computes.

    Args:
        sent: what goes to ``to``. received: memory for what comes from ``source``, of the sizes that it sends.
        to, source: ranks within the group.
    """

    def __init__(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], to: int, source: int, group: ProcessGroup
    ) -> None:
        self.received = received
        self._kept = [t.contiguous() for t in sent]  # until they have gone
        ranks = dist.get_process_group_ranks(group)
        operations = [dist.P2POp(dist.isend, t, ranks[to], group) for t in self._kept if t.numel()]
        operations += [dist.P2POp(dist.irecv, t, ranks[source], group) for t in received if t.numel()]
        for t in self._kept:
            count(t)
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Sequence[Tensor]:
        """What has come.

        Raises:
            RuntimeError: if the other process is gone, or the group's timeout is over.
        """
        for work in self._works:
            work.wait()
        return self.received


def gather(own: Tensor, shapes: Sequence[Sequence[int]], group: ProcessGroup) -> list[Tensor]:
    """Each process's tensor, by rank; shapes may differ. The own one is not copied."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    own = own.contiguous()
    parts = [own if r == rank else own.new_empty(tuple(shapes[r])) for r in range(len(ranks))]
    operations = []
    for r, other in enumerate(ranks):
        if r != rank:
            operations += [dist.P2POp(dist.isend, own, other, group)] if own.numel() else []
            operations += [dist.P2POp(dist.irecv, parts[r], other, group)] if parts[r].numel() else []
            count(own)
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return parts


def reduce_scatter(parts: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """The sum over all processes of their parts for this one; added in the order of ranks, so it repeats bitwise."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    kept = [p.contiguous() for p in parts]
    received = [kept[rank] if r == rank else torch.empty_like(kept[rank]) for r in range(len(ranks))]
    operations = []
    for r, other in enumerate(ranks):
        if r != rank:
            operations += [dist.P2POp(dist.isend, kept[r], other, group)] if kept[r].numel() else []
            operations += [dist.P2POp(dist.irecv, received[r], other, group)] if received[r].numel() else []
            count(kept[r])
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    total = received[0].clone()
    for part in received[1:]:
        total += part
    return total
