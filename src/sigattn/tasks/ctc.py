"""Speech recognition by connectionist temporal classification (Graves et al., 2006), decoded greedily."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from sigattn.data.dataset import Batch
from sigattn.models.speech import ALPHABET, SpeechModel, SpeechModelConfig
from sigattn.optional import require
from sigattn.tasks.task import Task
from sigattn.validation import SettingsError


@dataclass(frozen=True, kw_only=True)
class CTC(Task):
    """CTC's loss. A batch is frames (B, T, mels), lengths (B,), targets (B, C) and target_lengths (B,).

    Metrics: ``loss`` in nats for each character, ``wer`` and ``cer``, the word and character error rates in per cent.

    Attributes:
        alphabet: the characters of tokens 1, 2, …; "|" stands between words.
    """

    alphabet: str = ALPHABET
    metric = "wer"

    def build(self, model: SpeechModelConfig) -> nn.Module:
        """The speech model itself.

        Raises:
            SettingsError: if it has not one output for each character and the blank.
            MissingPackageError: without jiwer, which ``evaluate`` counts errors with.
        """
        require("jiwer", "word error rates", "'sigattn[speech]'")
        if model.vocabulary != 1 + len(self.alphabet):
            raise SettingsError(
                f"an alphabet of {len(self.alphabet)} characters needs vocabulary={1 + len(self.alphabet)}, got "
                f"{model.vocabulary}"
            )
        return SpeechModel(model)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """See ``SpeechModel.loss``."""
        frames, lengths, targets, target_lengths = batch
        log_probabilities, steps = module(frames, lengths)
        return F.ctc_loss(log_probabilities.transpose(0, 1), targets, steps, target_lengths, zero_infinity=True)

    def evaluate(self, module: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """See the class."""
        import jiwer

        loss, samples, said, heard = 0.0, 0, [], []
        for frames, lengths, targets, target_lengths in batches:
            log_probabilities, steps = module(frames, lengths)
            one = F.ctc_loss(log_probabilities.transpose(0, 1), targets, steps, target_lengths, zero_infinity=True)
            loss, samples = loss + one.item() * len(frames), samples + len(frames)
            heard += self.decode(log_probabilities, steps)
            said += [self.text(t[:n].tolist()) for t, n in zip(targets, target_lengths, strict=True)]
        if not said:
            return {"loss": 0.0, "wer": 0.0, "cer": 0.0}
        return {"loss": loss / samples, "wer": 100 * jiwer.wer(said, heard), "cer": 100 * jiwer.cer(said, heard)}

    def decode(self, log_probabilities: Tensor, steps: Tensor) -> list[str]:
        """The likeliest token of each step, repetitions merged and blanks left out: (B, T, vocabulary) → B texts."""
        texts = []
        for row, n in zip(log_probabilities.argmax(-1), steps.tolist(), strict=True):
            merged = row[:n].unique_consecutive().tolist()
            texts.append(self.text([token for token in merged if token]))
        return texts

    def text(self, tokens: list[int]) -> str:
        """Tokens as text."""
        return "".join(self.alphabet[t - 1] for t in tokens).replace("|", " ").strip()
