"""The paper's two synthetic problems (App. "Simple Experiments"), with new samples at every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sigattn.data.dataset import Batch, Data, sample_generator
from sigattn.validation import SettingsError


class KSummationData(Data):
    """Sequences of length / 2 normal numbers and a mask of as many zeros and k ones that marks the numbers to add.

    Args:
        length: length of the sequence, an even number.
        k: number of numbers to add.
        held_out: number of held-out sequences.
    """

    def __init__(self, length: int = 40, k: int = 1, held_out: int = 2048) -> None:
        if length % 2 or not 1 <= k <= length // 2:
            raise SettingsError(
                f"KSummationData: length must be even and k within 1 … length / 2, got {length} and {k}"
            )
        self.length = length
        self.k = k
        self.held_out = held_out

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return sequences (B, length) and sums (B, 1)."""
        batch = self._draw(size, sample_generator(seed, step, 0))
        return tuple(t[shard[0] :: shard[1]] for t in batch)

    def validation(self, size: int) -> Iterable[Batch]:
        """Return the held-out sequences and sums, the same at every call."""
        inputs, sums = self._draw(self.held_out, torch.Generator().manual_seed(1))
        return list(zip(inputs.split(size), sums.split(size), strict=True))

    @property
    def fingerprint(self) -> str:
        """Name and sizes of the problem."""
        return f"k-summation {self.length} {self.k}"

    def _draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        half = self.length // 2
        values = torch.randn(count, half, generator=generator)
        index = torch.rand(count, half, generator=generator).argsort(1)[:, : self.k]
        chosen = torch.zeros(count, half).scatter(1, index, 1.0)
        return torch.cat([values, chosen], 1), (values * chosen).sum(1, keepdim=True)


class PairRepeatData(Data):
    """Sequences of symbols and the answer if their first pair occurs again; in half of them it does, at random indices.

    Args:
        num_symbols: number of different symbols.
        max_length: length to which sequences are padded; the padding symbol is ``num_symbols``.
        lengths: lengths of the training sequences.
        held_out: number of held-out sequences per length.
    """

    def __init__(
        self, num_symbols: int = 9, max_length: int = 22, lengths: Sequence[int] = (14, 15), held_out: int = 1024
    ) -> None:
        if num_symbols < 2 or not all(4 <= n <= max_length for n in lengths):
            raise SettingsError(
                f"PairRepeatData: needs num_symbols ≥ 2 and lengths within 4 … {max_length}, got {num_symbols} and "
                f"{tuple(lengths)}"
            )
        self.num_symbols = num_symbols
        self.max_length = max_length
        self.lengths: tuple[int, ...] = tuple(lengths)
        self.held_out = held_out

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Return sequences (B, max_length) of symbols and answers (B,), 0 or 1."""
        generator = sample_generator(seed, step, 0)
        lengths = torch.tensor(self.lengths)[torch.randint(len(self.lengths), (size,), generator=generator)]
        batch = self._draw(lengths, generator)
        return tuple(t[shard[0] :: shard[1]] for t in batch)

    def validation(self, size: int) -> Iterable[Batch]:
        """Iterate over held-out sequences of the training lengths, the same at every call."""
        for length in self.lengths:
            yield from self.of_length(length, size)

    def of_length(self, length: int, size: int) -> Iterable[Batch]:
        """Return held-out sequences of one length up to ``max_length``, also beyond the training lengths."""
        sequences = self._draw(torch.full((self.held_out,), length), torch.Generator().manual_seed(length))
        return list(zip(*(t.split(size) for t in sequences), strict=True))

    @property
    def fingerprint(self) -> str:
        """Name and sizes of the problem."""
        return f"pair repeat {self.num_symbols} {self.max_length} {self.lengths}"

    def _draw(self, lengths: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        count = len(lengths)
        drawn = torch.randint(self.num_symbols, (count, self.max_length), generator=generator)
        answers = torch.arange(count)[torch.randperm(count, generator=generator)] % 2
        repeating = self._repeats(drawn, lengths)
        while repeating.any():  # redraw sequences that repeat their first pair by chance
            again = torch.randint(self.num_symbols, drawn.shape, generator=generator)
            drawn = torch.where(repeating[:, None], again, drawn)
            repeating = self._repeats(drawn, lengths)
        rows = answers.nonzero().squeeze(1)
        index = 2 + (torch.rand(count, generator=generator) * (lengths - 3)).long()  # 2 … length - 2
        for offset in (0, 1):
            drawn[rows, index[rows] + offset] = drawn[rows, offset]
        padding = torch.arange(self.max_length) >= lengths[:, None]
        return drawn.masked_fill(padding, self.num_symbols), answers

    @staticmethod
    def _repeats(drawn: Tensor, lengths: Tensor) -> Tensor:
        """Return a mask (B,) of the sequences (B, max_length) whose first pair occurs again later."""
        same = (drawn[:, 2:-1] == drawn[:, :1]) & (drawn[:, 3:] == drawn[:, 1:2])
        within = torch.arange(3, drawn.shape[1]) < lengths[:, None]
        return (same & within).any(1)
