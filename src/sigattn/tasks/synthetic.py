"""Objectives of the paper's two synthetic problems (App. "Simple Experiments")."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.data.task import Task
from sigattn.validation import check_at_least


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
