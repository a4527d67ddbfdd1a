"""Interface between data sets and the training loop, and sampling that depends on seed and step only."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from sigattn.validation import UserError

Batch = tuple[Tensor, ...]
MAX_UNREADABLE_FRACTION = 0.5  # a larger fraction indicates a systematic problem
MAX_NAMED = 5  # files that are reported by name


class PlaceholderBatch(tuple[Tensor, ...]):
    """Batch of a process for which a step has no sample of its own.

    It is computed, because all processes must take part in collectives, but its loss has weight 0.
    """


class DataError(UserError):
    """Data is missing or unusable; the message is one line."""


class UnreadableFiles:
    """Collection of a data set's unreadable files; the first are named when they are found, all are counted."""

    def __init__(self, kind: str, total: int = 0) -> None:
        self.kind = kind  # "image" or "recording"
        self.total = total  # number of files of the data set
        self.errors: dict[str, str] = {}  # by name

    def __len__(self) -> int:
        return len(self.errors)

    def add(self, name: str, error: str) -> None:
        """Record a file, and print a line about it if it is one of the first ``MAX_NAMED``.

        Raises DataError if more than ``MAX_UNREADABLE_FRACTION`` of all files cannot be read.
        """
        if name not in self.errors:
            if len(self) < MAX_NAMED:
                print(f"unreadable {self.kind} {name}: {error}", flush=True)
            elif len(self) == MAX_NAMED:
                print(f"further unreadable {self.kind}s are counted, and not named", flush=True)
            self.merge({name: error})

    def merge(self, errors: dict[str, str]) -> None:
        """Add files that another process has reported; raise as ``add`` does."""
        self.errors |= errors
        if errors and len(self) > MAX_UNREADABLE_FRACTION * self.total:
            name, error = next(reversed(self.errors.items()))
            raise DataError(f"{len(self)} of {self.total} {self.kind}s cannot be read, the last {name}: {error}")

    def summary(self) -> str:
        """Return one line for the end of a run; empty if every file could be read."""
        if not self.errors:
            return ""
        others = f" and {len(self) - MAX_NAMED} more" if len(self) > MAX_NAMED else ""
        return (
            f"{len(self)} of {self.total:,} {self.kind}s could not be read and were left out: "
            f"{', '.join(list(self.errors)[:MAX_NAMED])}{others}"
        )


class Data(ABC):
    """Training and held-out batches.

    The samples of a step depend on the seed and the step only, not on the number of processes or interruptions of the
    run.

    Attributes:
        batch_unit: unit of a batch's size, "samples" or "seconds".
        unreadable: files that could not be read; None for data that is not read file by file.
    """

    batch_unit: Literal["samples", "seconds"] = "samples"
    unreadable: UnreadableFiles | None = None

    @abstractmethod
    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return this process's part of the batch of a step, 0, 1, …

        ``size`` is the batch size over all processes, ``seed`` the seed of the order and of augmentation.
        With ``shard`` (rank, ranks) a process gets every ranks-th sample from index rank on.
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
        return self.unreadable.summary() if self.unreadable is not None else ""

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
