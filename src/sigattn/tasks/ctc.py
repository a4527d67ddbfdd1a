"""Speech recognition by connectionist temporal classification (Graves et al., 2006), decoded greedily."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.data.task import Task, no_batches
from sigattn.models.speech import ALPHABET, SpeechModelConfig
from sigattn.optional import require
from sigattn.validation import SettingsError


@dataclass(frozen=True, kw_only=True)
class CTC(Task):
    """CTC loss. A batch is frames (B, T, mels), lengths (B,), targets (B, C) and target_lengths (B,).

    Metrics: ``loss`` in nats per character, ``wer`` and ``cer``, the word and character error rates in per cent.

    Attributes:
        alphabet: characters of tokens 1, 2, …; "|" separates words.
    """

    alphabet: str = ALPHABET
    metric = "wer"

    def build(self, model: SpeechModelConfig) -> nn.Module:
        """Return the speech model; raise SettingsError if its vocabulary is not the alphabet and the blank."""
        require("jiwer", "word error rates", "'sigattn[speech]'")
        if model.vocab_size != 1 + len(self.alphabet):
            raise SettingsError(
                f"an alphabet of {len(self.alphabet)} characters needs vocab_size={1 + len(self.alphabet)}, got "
                f"{model.vocab_size}"
            )
        return model.build()

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return CTC's loss, averaged over samples after division by the number of characters of each."""
        frames, lengths, targets, target_lengths = batch
        log_probabilities, steps = module(frames, lengths)
        return _ctc_loss(log_probabilities, steps, targets, target_lengths)

    def distributions(self, output: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        log_probabilities, steps = output
        exists = torch.arange(log_probabilities.shape[1], device=steps.device) < steps[:, None]
        return log_probabilities, exists / (len(steps) * steps[:, None].clamp(min=1))

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        import jiwer

        loss, samples, references, hypotheses = 0.0, 0, [], []
        for frames, lengths, targets, target_lengths in batches:
            log_probabilities, steps = module(frames, lengths)
            batch_loss = _ctc_loss(log_probabilities, steps, targets, target_lengths)
            loss, samples = loss + batch_loss.item() * len(frames), samples + len(frames)
            hypotheses += self.decode(log_probabilities, steps)
            references += [self.text(t[:n].tolist()) for t, n in zip(targets, target_lengths, strict=True)]
        if not references:
            raise no_batches()
        wer, cer = (100 * rate(references, hypotheses) for rate in (jiwer.wer, jiwer.cer))
        return {"loss": loss / samples, "wer": wer, "cer": cer}

    def decode(self, log_probabilities: Tensor, steps: Tensor) -> list[str]:
        """Decode greedily, (B, T, vocabulary) → B texts: best token per step, repetitions merged, blanks removed."""
        texts = []
        for row, n in zip(log_probabilities.argmax(-1), steps.tolist(), strict=True):
            merged = row[:n].unique_consecutive().tolist()
            texts.append(self.text([token for token in merged if token]))
        return texts

    def text(self, tokens: list[int]) -> str:
        """Return tokens as text, with "|" as spaces."""
        return "".join(self.alphabet[t - 1] for t in tokens).replace("|", " ").strip()


def _ctc_loss(log_probabilities: Tensor, steps: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
    """Return the CTC loss in nats per character, averaged over samples; 0 for a target too long for its steps."""
    return F.ctc_loss(log_probabilities.transpose(0, 1), targets, steps, target_lengths, zero_infinity=True)
