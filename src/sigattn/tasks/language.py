"""Language modelling: the next token of each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.models.language import LanguageModel, LanguageModelConfig
from sigattn.nn.documents import Documents
from sigattn.tasks.task import Task
from sigattn.validation import SettingsError, check_at_least


@dataclass(frozen=True, kw_only=True)
class LanguageModelling(Task):
    """Cross-entropy of the next token. A batch is tokens and targets, both (B, N), targets below 0 being left out.

    Metrics: ``loss`` in nats for each token, ``bits`` in bits, ``perplexity``, ``accuracy`` of the likeliest token.

    Attributes:
        end_token: what ends each document of a packed row (``sigattn tokenizer`` gives it number 0). No token then
            looks into another document, and a document's first token is not predicted. None lets rows be as they come.
    """

    end_token: int | None = None

    metric = "bits"

    def __post_init__(self) -> None:
        check_at_least(0, self, "end_token")

    def build(self, model: LanguageModelConfig) -> nn.Module:
        """The language model itself.

        Raises:
            SettingsError: if its vocabulary does not hold the end token.
        """
        if self.end_token is not None and self.end_token >= model.vocabulary:
            raise SettingsError(f"end_token must be below the vocabulary of {model.vocabulary}, got {self.end_token}")
        return LanguageModel(model)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy, in nats."""
        logits, targets = self._predict(module, batch)
        return F.cross_entropy(logits, targets, ignore_index=-1)

    def _predict(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (B · N, vocabulary) in float32, and what they should tell (B · N,)."""
        tokens, targets = batch
        if self.end_token is None:
            logits = module(tokens)
        else:
            logits = module(tokens, documents=Documents.ending_with(tokens, self.end_token))
            targets = targets.masked_fill(tokens == self.end_token, -1)
        return logits.flatten(0, 1).float(), targets.flatten()

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """See the class."""
        total = correct = count = 0.0
        for batch in batches:
            logits, wanted = self._predict(module, batch)
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
