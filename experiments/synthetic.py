"""The paper's two synthetic problems (App. "Simple Experiments"): generated data, tasks and recipes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.sequence_model import SequenceModelConfig
from sigattn.data.dataset import Batch, Data, sample_generator
from sigattn.data.task import Task
from sigattn.recipes.recipe import DataSource, Recipe
from sigattn.train.config import TrainConfig
from sigattn.validation import SettingsError, check_at_least

TRAINING = TrainConfig(
    batch_size=256,
    optimizer="adam",
    learning_rate=1e-3,
    betas=(0.9, 0.999),
    weight_decay=0.0,
    max_grad_norm=None,
    warmup_steps=0,
    final_learning_rate=0.0,
    validate_every=1000,
    checkpoint_every=1000,
    log_attention_every=10,
)


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


@dataclass(frozen=True, kw_only=True)
class KSummation(Task):
    """Mean squared error of the sum of k marked numbers. A batch is sequences (B, n) and sums (B, 1). Metrics: loss.

    Attributes:
        k: number of numbers that are added.
    """

    k: int = 1
    metric = "loss"

    def __post_init__(self) -> None:
        check_at_least(1, self, "k")

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared error."""
        return F.mse_loss(module(batch[0]).float(), batch[1])


@dataclass(frozen=True, kw_only=True)
class PairRepeat(Task):
    """Binary cross-entropy of the answer if the first pair of symbols occurs again in a sequence.

    A batch is symbols (B, n) and answers (B,). Metrics: ``loss``, ``accuracy``.

    Attributes:
        lengths: lengths of the training sequences, each at least 4: two pairs.
    """

    lengths: tuple[int, ...] = (14, 15)
    metric = "accuracy"

    def __post_init__(self) -> None:
        check_at_least(4, self, "lengths")

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean binary cross-entropy in nats."""
        return F.binary_cross_entropy_with_logits(module(batch[0]).squeeze(-1).float(), batch[1].float())

    def measure(self, module: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], int]:
        symbols, answers = batch
        logits = module(symbols).squeeze(-1).float()
        loss = F.binary_cross_entropy_with_logits(logits, answers.float(), reduction="sum")
        return {"loss": loss, "accuracy": ((logits > 0) == answers.bool()).sum()}, len(answers)


@dataclass(frozen=True, kw_only=True)
class KSummationSource(DataSource):
    """Sequences of numbers, generated."""

    name: str = "generated"

    def load(self, recipe: Recipe, path: Path | None, tokenizer: Path | None, workers: int) -> KSummationData:
        model: Any = recipe.model
        task: Any = recipe.task
        return KSummationData(model.seq_len, task.k)


@dataclass(frozen=True, kw_only=True)
class PairRepeatSource(DataSource):
    """Sequences of symbols, generated."""

    name: str = "generated"

    def load(self, recipe: Recipe, path: Path | None, tokenizer: Path | None, workers: int) -> PairRepeatData:
        model: Any = recipe.model
        task: Any = recipe.task
        return PairRepeatData(model.num_symbols, model.seq_len, task.lengths)


def k_summation(k: int) -> Recipe:
    """Return the recipe of one layer of width 120 that adds the k marked ones of 20 numbers.

    With ``kind="mlp"`` the model is the MLP of 307k parameters.
    """
    return Recipe(
        name="k-summation",
        domain="Synthetic",
        objective="k-summation",
        model=SequenceModelConfig(),
        task=KSummation(k=k),
        training=replace(TRAINING, max_steps=20_000, schedule="constant"),
        tiny_training={},
        data=KSummationSource(),
    )


def pair_repeat() -> Recipe:
    """Return the recipe of two layers of width 160 that decide if the first pair of 14 or 15 symbols occurs again.

    With ``kind="mlp"`` the model is an MLP with as many parameters, 638k.
    """
    return Recipe(
        name="pair-repeat",
        domain="Synthetic",
        objective="pair repeat",
        model=SequenceModelConfig(num_layers=2, embed_dim=160, seq_len=22, num_symbols=9, mlp_dims=(695, 695)),
        task=PairRepeat(),
        training=replace(TRAINING, max_steps=19_531, warmup_steps=976),
        tiny_training={},
        data=PairRepeatSource(),
    )
