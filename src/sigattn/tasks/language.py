"""Language modelling: prediction of the next token."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.data.task import Task
from sigattn.models.language import LanguageModelConfig
from sigattn.nn.documents import Documents
from sigattn.validation import SettingsError, check_at_least


@dataclass(frozen=True, kw_only=True)
class LanguageModelling(Task):
    """Cross-entropy of the next token. A batch is tokens and targets, both (B, N); targets below 0 are ignored.

    Metrics: ``loss`` in nats per token, ``bits`` in bits per token, ``perplexity``, ``accuracy`` of the most probable
    token.

    Attributes:
        end_token: token that ends each document of a packed row (0 in tokenizers of ``sigattn tokenizer``). If given,
            tokens attend within their own document only, and a document's first token is not predicted. If None, each
            row is one document.
    """

    end_token: int | None = None

    metric = "bits"

    @property
    def needs_whole_sequences(self) -> bool:  # type: ignore[override]
        """True if rows are divided into documents."""
        return self.end_token is not None

    def __post_init__(self) -> None:
        check_at_least(0, self, "end_token")

    def build(self, model: LanguageModelConfig) -> nn.Module:
        """Return the language model; raise SettingsError if its vocabulary does not contain the end token."""
        if self.end_token is not None and self.end_token >= model.vocab_size:
            raise SettingsError(f"end_token must be below the vocabulary of {model.vocab_size}, got {self.end_token}")
        return model.build()

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        logits, targets = self._predict(module, batch)
        # not the mean of cross_entropy, which is NaN if all targets are ignored
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum") / self.count(batch).clamp(min=1)

    def count(self, batch: Batch) -> Tensor:
        """Return the number of targets that are not ignored."""
        return (self.targets(batch) >= 0).sum()

    def targets(self, batch: Batch) -> Tensor:
        """Return the targets, (B, N), -1 for those that are ignored."""
        tokens, targets = batch
        if self.end_token is not None:
            targets = targets.masked_fill(tokens == self.end_token, -1)
        return targets.clamp(min=-1)

    def distributions(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        counted = self.targets(batch) >= 0
        return output, counted / counted.sum().clamp(min=1)

    def _predict(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits (B · N, vocabulary) in float32 and targets (B · N,)."""
        tokens, end = batch[0], self.end_token
        logits = module(tokens) if end is None else module(tokens, documents=Documents.from_end_token(tokens, end))
        return logits.flatten(0, 1).float(), self.targets(batch).flatten()

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        metrics = super().evaluate(module, batches)
        loss = metrics["loss"]
        return {"loss": loss, "bits": loss / math.log(2), "perplexity": math.exp(min(loss, 700)), **metrics}

    def measure(self, module: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], int]:
        logits, targets = self._predict(module, batch)
        loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        return {"loss": loss, "accuracy": (logits.argmax(-1) == targets).sum()}, int(self.count(batch))
