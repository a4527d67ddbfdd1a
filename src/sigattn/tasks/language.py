"""Language modelling: the next token of each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class LanguageModelling(Task):
    """Cross-entropy of the next token. A batch is tokens and targets, both (B, N), targets below 0 being left out.

    Metrics: ``loss`` in nats for each token, ``bits`` in bits, ``perplexity``, ``accuracy`` of the likeliest token.
    """

    metric = "bits"

    def build(self, model: LanguageModelConfig) -> nn.Module:
        """The language model itself."""
        return LanguageModel(model)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy, in nats."""
        tokens, targets = batch
        return F.cross_entropy(module(tokens).flatten(0, 1).float(), targets.flatten(), ignore_index=-1)

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """See the class."""
        total = correct = count = 0.0
        for tokens, targets in batches:
            logits, wanted = module(tokens).flatten(0, 1).float(), targets.flatten()
            total += F.cross_entropy(logits, wanted, ignore_index=-1, reduction="sum").item()
            correct += (logits.argmax(-1) == wanted).sum().item()
            count += (wanted >= 0).sum().item()
        loss = total / max(count, 1)
        return {
            "loss": loss,
            "bits": loss / math.log(2),
            "perplexity": math.exp(min(loss, 700)),
            "accuracy": correct / max(count, 1),
        }
