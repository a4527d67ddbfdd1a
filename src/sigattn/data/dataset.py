"""Interface between data sets and the training loop, and sampling that depends on seed and step only."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

Batch = tuple[Tensor, ...]


class PlaceholderBatch(tuple[Tensor, ...]):
    """Batch of a process for which a step has no sample of its own.

    It is computed, because all processes must take part in collectives, but its loss has weight 0.
    """


class DataError(Exception):
    """Data is missing or unusable; the message is one line."""


class Data(ABC):
    """Training and held-out batches.

    The samples of a step depend on the seed and the step only, not on the number of processes or interruptions of the
    run.

    Attributes:
        batch_unit: unit of a batch's size, "samples" or "seconds".
    """

    batch_unit: Literal["samples", "seconds"] = "samples"

    @abstractmethod
    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return this process's part of a step's batch.

        Args:
            step: number of the step, from 0.
            size: batch size over all processes.
            seed: seed of the order and of augmentation.
            shard: (rank, ranks); this process gets every ranks-th sample from index rank on.
        """

    def batches(self, first_step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """Iterate over the batches of ``first_step`` and all later steps, without end."""
        for step in itertools.count(first_step):
            yield self.batch(step, size, seed, shard)

    @abstractmethod
    def validation(self, size: int) -> Iterable[Batch]:
        """Return the held-out batches of at most ``size`` samples, the same at every call."""

    def unreadable_summary(self) -> str:
        """Return one line about samples that could not be read; empty if there are none."""
        return ""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Identity of the data; a run is resumed only with data of the same fingerprint."""


def draw_samples(samples: int, step: int, size: int, seed: int) -> Sequence[tuple[int, int]]:
    """Return (index, epoch) of each sample of a step's batch; every epoch has its own order of all samples."""
    first = step * size
    chosen: list[tuple[int, int]] = []
    while len(chosen) < size:
        epoch, offset = divmod(first + len(chosen), samples)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(samples, generator=generator)
        chosen += [(int(i), epoch) for i in order[offset : offset + size - len(chosen)]]
    return chosen


def sample_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """Return the generator of a sample's augmentation: it depends on seed, epoch and index, not on the process."""
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) * 2_147_483_647 + index & (1 << 62) - 1)
