"""Which part of a sequence is whose, where processes share sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from sigattn.distributed import exchange


class Segment(NamedTuple):
    """The positions start … stop - 1 of a whole sequence."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Placement(NamedTuple):
    """How a sequence is shared out.

    Attributes:
        length: of the whole sequence. ranks: how many processes share it.
        balanced: whether each has one piece from the front and its mirror image from the back, so that under a causal
            mask all have the same to do; else one piece each, in order.
    """

    length: int
    ranks: int
    balanced: bool

    def segments(self, rank: int) -> list[Segment]:
        """A process's pieces, in order. Pieces differ by one position at most where the length does not divide."""
        pieces = 2 * self.ranks if self.balanced else self.ranks
        own = (rank, pieces - 1 - rank) if self.balanced else (rank,)
        return [Segment(p * self.length // pieces, (p + 1) * self.length // pieces) for p in own]

    def size(self, rank: int) -> int:
        """How many positions a process has."""
        return sum(s.size for s in self.segments(rank))

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """A process's positions, (n,) int64."""
        return torch.cat([torch.arange(*s, device=device) for s in self.segments(rank)])

    def shard(self, whole: Tensor, rank: int, dim: int = 1) -> Tensor:
        """A process's part of what it holds whole."""
        return torch.cat([whole.narrow(dim, s.start, s.size) for s in self.segments(rank)], dim)

    def unshard(self, part: Tensor, group: ProcessGroup, dim: int = 1) -> Tensor:
        """The whole, on each process, of what each holds a part of. (Without gradient.)"""
        shape = list(part.shape)
        shapes: list[Sequence[int]] = [[*shape[:dim], self.size(r), *shape[dim + 1 :]] for r in range(self.ranks)]
        parts = exchange.gather(part.detach(), shapes, group)
        whole = part.new_empty(*shape[:dim], self.length, *shape[dim + 1 :])
        for r, theirs in enumerate(parts):
            start = 0
            for s in self.segments(r):
                whole.narrow(dim, s.start, s.size).copy_(theirs.narrow(dim, start, s.size))
                start += s.size
        return whole


def placement_of(local: int, length: int | None, group: ProcessGroup, balanced: bool) -> Placement:
    """The placement of sequences of which this process has so many positions.

    Args:
        local: this process's number of positions.
        length: of the whole; None where all processes have the same number.

    Raises:
        ValueError: if this process should have another number.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    found = Placement(local * ranks if length is None else length, ranks, balanced)
    if found.size(rank) != local:
        given = f"length={length}" if length is not None else "no length given"
        raise ValueError(
            f"of {found.length} positions over {ranks} processes, balanced={balanced}, process {rank} has "
            f"{found.size(rank)}, but got {local} ({given}): share them out by Placement.shard and pass length"
        )
    return found
