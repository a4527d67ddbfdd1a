"""k-summation: add the k marked numbers of a sequence (App. "k-Summation Problem Definition")."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.models.sequence import SequenceModel, SequenceModelConfig
from sigattn.tasks.task import Task
from sigattn.validation import check_at_least


@dataclass(frozen=True, kw_only=True)
class KSummation(Task):
    """Mean squared error of the sum. A batch is sequences (B, n) and sums (B, 1). Metrics: ``loss``.

    Attributes:
        k: number of numbers that are added.
    """

    k: int = 1
    metric = "loss"

    def __post_init__(self) -> None:
        check_at_least(1, self, "k")

    def build(self, model: SequenceModelConfig) -> nn.Module:
        """Return the sequence model."""
        return SequenceModel(model)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared error."""
        return F.mse_loss(module(batch[0]).float(), batch[1])
