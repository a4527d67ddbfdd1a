"""Distribution of a sequence's positions over processes, for context parallelism."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor


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

    def segments(self, rank: int) -> list[range]:
        """Return the positions of each segment of a process, in order. Sizes differ by at most one position."""
        count = 2 * self.ranks if self.balanced else self.ranks
        indices = (rank, count - 1 - rank) if self.balanced else (rank,)
        return [range(i * self.length // count, (i + 1) * self.length // count) for i in indices]

    def size(self, rank: int) -> int:
        """Return the number of positions of a process."""
        return sum(len(s) for s in self.segments(rank))

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of a process, (n,) int64."""
        return torch.cat([torch.arange(s.start, s.stop, device=device) for s in self.segments(rank)])

    def shard(self, whole: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return the part of a process from a tensor over the whole sequence."""
        return torch.cat([whole.narrow(dim, s.start, len(s)) for s in self.segments(rank)], dim)

    def visible_pairs(
        self, query_rank: int, key_rank: int, left: int, right: int
    ) -> list[tuple[slice, slice, range, range]]:
        """Return the pairs of segments of two processes, with queries and keys, that a window does not hide entirely.

        A pair has the slices of the local queries and keys, and their positions in the whole sequence.
        """
        pairs = []
        for rows, q in self._local_segments(query_rank):
            for columns, k in self._local_segments(key_rank):
                after = right >= 0 and k.start > q.stop - 1 + right
                before = left >= 0 and k.stop - 1 < q.start - left
                if q and k and not after and not before:
                    pairs.append((rows, columns, q, k))
        return pairs

    def _local_segments(self, rank: int) -> list[tuple[slice, range]]:
        segments = self.segments(rank)
        stops = itertools.accumulate(map(len, segments))
        return [(slice(stop - len(s), stop), s) for s, stop in zip(segments, stops, strict=True)]
