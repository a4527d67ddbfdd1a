"""Distribution of a sequence's positions over processes, for context parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from sigattn.distributed import collectives


class Segment(NamedTuple):
    """Positions start … stop - 1 of a whole sequence."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class SequenceSharding(NamedTuple):
    """Distribution of a sequence's positions over processes.

    Attributes:
        length: length of the whole sequence. ranks: number of processes that share it.
        balanced: True if process r has segments r and 2 · ranks - 1 - r of 2 · ranks, so that all processes have the
            same work under a causal mask; False if process r has segment r of ranks.
    """

    length: int
    ranks: int
    balanced: bool

    def segments(self, rank: int) -> list[Segment]:
        """Return the segments of a process, in order. The sizes of segments differ by at most one position."""
        count = 2 * self.ranks if self.balanced else self.ranks
        indices = (rank, count - 1 - rank) if self.balanced else (rank,)
        return [Segment(i * self.length // count, (i + 1) * self.length // count) for i in indices]

    def size(self, rank: int) -> int:
        """Return the number of positions of a process."""
        return sum(s.size for s in self.segments(rank))

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of a process, (n,) int64."""
        return torch.cat([torch.arange(*s, device=device) for s in self.segments(rank)])

    def shard(self, whole: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return the part of a process from a tensor over the whole sequence."""
        return torch.cat([whole.narrow(dim, s.start, s.size) for s in self.segments(rank)], dim)

    def unshard(self, part: Tensor, group: ProcessGroup, dim: int = 1) -> Tensor:
        """Gather the parts of all processes and return the tensor over the whole sequence, without gradient."""
        shape = list(part.shape)
        shapes: list[Sequence[int]] = [[*shape[:dim], self.size(r), *shape[dim + 1 :]] for r in range(self.ranks)]
        parts = collectives.gather(part.detach(), shapes, group)
        whole = part.new_empty(*shape[:dim], self.length, *shape[dim + 1 :])
        for r, received in enumerate(parts):
            start = 0
            for s in self.segments(r):
                whole.narrow(dim, s.start, s.size).copy_(received.narrow(dim, start, s.size))
                start += s.size
        return whole


def infer_sequence_sharding(local: int, length: int | None, group: ProcessGroup, balanced: bool) -> SequenceSharding:
    """Return the placement of sequences over a group, given this process's number of positions.

    Args:
        local: this process's number of positions.
        length: length of the whole sequence; None if all processes have the same number of positions.
        group, balanced: the processes, and ``SequenceSharding.balanced``.

    Raises:
        ValueError: if the placement gives this process another number of positions.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    placement = SequenceSharding(local * ranks if length is None else length, ranks, balanced)
    if placement.size(rank) != local:
        given = f"length={length}" if length is not None else "no length given"
        raise ValueError(
            f"of {placement.length} positions over {ranks} processes, balanced={balanced}, process {rank} has "
            f"{placement.size(rank)}, but got {local} ({given}): shard the sequence "
            "by SequenceSharding.shard and pass length"
        )
    return placement
