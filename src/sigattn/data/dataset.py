"""What a training loop asks of data, and how samples are drawn in an order that depends on seed and step alone."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

Batch = tuple[Tensor, ...]


class DataError(Exception):
    """Data that is missing or unusable; the message is one line, for the person who named it."""


class Data(ABC):
    """Batches to train on, and held-out ones.

    What a step is trained on depends on the seed and the step alone: not on the number of processes, nor on whether the
    run was interrupted.
    """

    @abstractmethod
    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """This process's part of a step's batch.

        Args:
            step: which.
            size: samples over all processes.
            seed: of the order, and of augmentation.
            shard: (rank, ranks): every ranks-th sample, from the rank-th on.
        """

    def batches(self, first_step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """The batches of the steps from one on, without end."""
        for step in itertools.count(first_step):
            yield self.batch(step, size, seed, shard)

    @abstractmethod
    def validation(self, size: int) -> Iterable[Batch]:
        """Held-out batches of at most so many samples, always the same."""

    def left_out(self) -> str:
        """Return a line about samples that could not be read; empty if there are none."""
        return ""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Tells this data from other data: a run is only resumed on its own."""


def shuffled(samples: int, step: int, size: int, seed: int) -> Sequence[tuple[int, int]]:
    """The samples of a step's batch and the epoch of each: passes over all samples, each in an order of its own."""
    first = step * size
    chosen: list[tuple[int, int]] = []
    while len(chosen) < size:
        epoch, at = divmod(first + len(chosen), samples)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(samples, generator=generator)
        chosen += [(int(i), epoch) for i in order[at : at + size - len(chosen)]]
    return chosen


def sample_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """What a sample's augmentation is drawn from: its own in each epoch, on whatever process it is."""
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) * 2_147_483_647 + index & (1 << 62) - 1)
