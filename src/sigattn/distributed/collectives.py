"""Point-to-point collectives for tensors whose shapes differ between processes, with a count of the bytes sent."""

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
    """Traffic that this process sent.

    Attributes:
        bytes: number of bytes. messages: number of tensors.
    """

    bytes: int = 0
    messages: int = 0


_counting: list[Traffic] = []


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count the tensors that this process sends through this module within the context."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def count(t: Tensor, times: int = 1) -> None:
    """Add a tensor that is sent ``times`` times to the active counts."""
    for traffic in _counting:
        traffic.bytes += times * t.numel() * t.element_size()
        traffic.messages += times


class Transfer:
    """Asynchronous transfer of tensors to one process and from another.

    Args:
        sent: tensors to send to ``to``. received: output tensors for those of ``source``, of the same shapes as those.
        to, source: ranks within the group.
    """

    def __init__(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], to: int, source: int, group: ProcessGroup
    ) -> None:
        self.received = received
        self._sent = [t.contiguous() for t in sent]  # an attribute, so that the memory is kept during the transfer
        ranks = dist.get_process_group_ranks(group)
        operations = [dist.P2POp(dist.isend, t, ranks[to], group) for t in self._sent if t.numel()]
        operations += [dist.P2POp(dist.irecv, t, ranks[source], group) for t in received if t.numel()]
        for t in self._sent:
            count(t)
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Sequence[Tensor]:
        """Wait for the transfer and return the received tensors.

        Raises:
            RuntimeError: if the other process has ended, or the group's timeout has expired.
        """
        for work in self._works:
            work.wait()
        return self.received


def gather(own: Tensor, shapes: Sequence[Sequence[int]], group: ProcessGroup) -> list[Tensor]:
    """Return every process's tensor, by rank, without a copy of the own one. The shapes may differ between ranks."""
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
    """Return the sum over all processes of ``parts[rank]``, added in the order of ranks, so that it repeats bitwise."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    sent = [p.contiguous() for p in parts]
    received = [sent[rank] if r == rank else torch.empty_like(sent[rank]) for r in range(len(ranks))]
    operations = []
    for r, other in enumerate(ranks):
        if r != rank:
            operations += [dist.P2POp(dist.isend, sent[r], other, group)] if sent[r].numel() else []
            operations += [dist.P2POp(dist.irecv, received[r], other, group)] if received[r].numel() else []
            count(sent[r])
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    total = received[0].clone()
    for part in received[1:]:
        total += part
    return total
