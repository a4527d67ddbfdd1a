"""The paper's two synthetic problems, drawn anew at every step (App. "Simple Experiments")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sigattn.data.dataset import Batch, Data, sample_generator
from sigattn.validation import SettingsError


class KSummation(Data):
    """Half of the numbers are normal, the other half says by k ones which of them to add.

    Args:
        length: of the sequence, an even number. k: how many are added. held_out: number of sequences held out.
    """

    def __init__(self, length: int = 40, k: int = 1, held_out: int = 2048) -> None:
        if length % 2 or not 1 <= k <= length // 2:
            raise SettingsError(f"KSummation: length must be even and k within 1 … length / 2, got {length} and {k}")
        self.length, self.k, self.held_out = length, k, held_out

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Sequences (B, length) and sums (B, 1)."""
        whole = self._draw(size, sample_generator(seed, step, 0))
        return tuple(t[shard[0] :: shard[1]] for t in whole)

    def validation(self, size: int) -> Iterable[Batch]:
        """The same, always those."""
        inputs, sums = self._draw(self.held_out, torch.Generator().manual_seed(1))
        return list(zip(inputs.split(size), sums.split(size), strict=True))

    @property
    def fingerprint(self) -> str:
        """The problem's name."""
        return f"k-summation {self.length} {self.k}"

    def _draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        half = self.length // 2
        values = torch.randn(count, half, generator=generator)
        places = torch.rand(count, half, generator=generator).argsort(1)[:, : self.k]
        chosen = torch.zeros(count, half).scatter(1, places, 1.0)
        return torch.cat([values, chosen], 1), (values * chosen).sum(1, keepdim=True)


class PairRepeat(Data):
    """Does the first pair of symbols come again? Half of the sequences say yes, at a place that is uniformly drawn.

    Args:
        symbols: how many there are. longest: sequences are padded to it, with the number of symbols.
        lengths: of sequences to train on. held_out: number of sequences of each length held out.
    """

    def __init__(
        self, symbols: int = 9, longest: int = 22, lengths: Sequence[int] = (14, 15), held_out: int = 1024
    ) -> None:
        if symbols < 2 or not all(4 <= n <= longest for n in lengths):
            raise SettingsError(
                f"PairRepeat needs two symbols and lengths within 4 … {longest}, got {symbols} and {tuple(lengths)}"
            )
        self.symbols, self.longest, self.lengths, self.held_out = symbols, longest, tuple(lengths), held_out

    def batch(self, step: int, size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> Batch:
        """Sequences (B, longest) of symbols and answers (B,), 0 or 1."""
        generator = sample_generator(seed, step, 0)
        lengths = torch.tensor(self.lengths)[torch.randint(len(self.lengths), (size,), generator=generator)]
        whole = self._draw(lengths, generator)
        return tuple(t[shard[0] :: shard[1]] for t in whole)

    def validation(self, size: int) -> Iterable[Batch]:
        """Sequences of the lengths trained on, always those."""
        for length in self.lengths:
            yield from self.of_length(length, size)

    def of_length(self, length: int, size: int) -> Iterable[Batch]:
        """Held-out sequences of any length up to the longest: how answers fall off beyond what was trained."""
        whole = self._draw(torch.full((self.held_out,), length), torch.Generator().manual_seed(length))
        return list(zip(*(t.split(size) for t in whole), strict=True))

    @property
    def fingerprint(self) -> str:
        """The problem's name."""
        return f"pair repeat {self.symbols} {self.longest} {self.lengths}"

    def _draw(self, lengths: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        count = len(lengths)
        drawn = torch.randint(self.symbols, (count, self.longest), generator=generator)
        answers = torch.arange(count)[torch.randperm(count, generator=generator)] % 2
        wrong = self._repeats(drawn, lengths)
        while wrong.any():  # first let nobody repeat
            again = torch.randint(self.symbols, drawn.shape, generator=generator)
            drawn = torch.where(wrong[:, None], again, drawn)
            wrong = self._repeats(drawn, lengths)
        rows = answers.nonzero().squeeze(1)
        places = 2 + (torch.rand(count, generator=generator) * (lengths - 3)).long()  # 2 … length - 2
        for offset in (0, 1):
            drawn[rows, places[rows] + offset] = drawn[rows, offset]
        padding = torch.arange(self.longest) >= lengths[:, None]
        return drawn.masked_fill(padding, self.symbols), answers

    @staticmethod
    def _repeats(drawn: Tensor, lengths: Tensor) -> Tensor:
        """Which sequences (B, longest) have their first pair again, from the third symbol on."""
        same = (drawn[:, 2:-1] == drawn[:, :1]) & (drawn[:, 3:] == drawn[:, 1:2])
        within = torch.arange(3, drawn.shape[1]) < lengths[:, None]
        return (same & within).any(1)
