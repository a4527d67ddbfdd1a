"""Pair repeat: decide if the first pair of symbols occurs again in a sequence (App. "Pair Repeat Problem")."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.models.sequence import SequenceModel, SequenceModelConfig
from sigattn.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class PairRepeat(Task):
    """Binary cross-entropy of the answer. A batch is symbols (B, n) and answers (B,).

    Metrics: ``loss``, ``accuracy``.
    """

    metric = "accuracy"

    def build(self, model: SequenceModelConfig) -> nn.Module:
        """Return the sequence model."""
        return SequenceModel(model)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean binary cross-entropy in nats."""
        return F.binary_cross_entropy_with_logits(module(batch[0]).squeeze(-1).float(), batch[1].float())

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        loss = correct = count = 0.0
        for symbols, answers in batches:
            logits = module(symbols).squeeze(-1).float()
            loss += F.binary_cross_entropy_with_logits(logits, answers.float(), reduction="sum").item()
            correct += ((logits > 0) == answers.bool()).sum().item()
            count += len(answers)
        return {"loss": loss / max(count, 1), "accuracy": correct / max(count, 1)}
