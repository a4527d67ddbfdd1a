"""Generation token by token: sampling and beam search, for batches of prompts of any lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sigattn.nn.kv_cache import LayerCache
from sigattn.validation import SettingsError, check_at_least, check_finite, check_not_negative

Step = Callable[[Tensor, "list[LayerCache]"], Tensor]  # new tokens (B, n) and a cache → logits (B, n, vocabulary)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Options of sampling and beam search.

    Attributes:
        temperature: divisor of the logits; 0 for greedy decoding.
        top_k: number of most probable tokens to sample from; None for all.
        top_p: probability of the smallest set of most probable tokens to sample from; None for all.
        beams: number of beams of beam search; 1 for sampling.
        length_penalty: beam search compares Σ log p / length^length_penalty.
        stop: tokens that end a sequence.

    Raises:
        SettingsError: a ValueError, for numbers out of range, or sampling options with beam search.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    beams: int = 1
    length_penalty: float = 1.0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_not_negative(self, "temperature")
        check_at_least(1, self, "top_k", "beams")
        check_at_least(0, self, "stop")
        check_finite(self, "length_penalty")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SettingsError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.beams > 1 and (self.temperature or self.top_k or self.top_p):
            raise SettingsError(
                f"beam search does not sample: with beams={self.beams} set temperature=0, top_k=None and top_p=None"
            )

    def pick(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw one token of each row of logits, (B, vocabulary); return (B,)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        weights = torch.softmax(logits, dim=-1)
        if self.top_p is not None:
            ordered, order = weights.sort(descending=True)
            excluded = ordered.cumsum(-1) - ordered >= self.top_p  # the more probable tokens have top_p already
            weights = torch.zeros_like(weights).scatter(-1, order, ordered.masked_fill(excluded, 0))
        return torch.multinomial(weights, 1, generator=generator).squeeze(-1)


class Sequences:
    """Prompts with their continuations, and the key/value cache of the model.

    When a sequence exceeds the context, the model starts again from the last half of the context. Prompts of different
    lengths are padded on the left; padding is masked.

    Args:
        step: the model. new_cache: function from the first position of each sample (None: all 0) to an empty cache.
        prompts: at least one token each. context: length of the longest sequence.
    """

    def __init__(
        self, step: Step, new_cache: Callable[[Tensor | None], list[LayerCache]], prompts: list[Tensor], context: int
    ) -> None:
        self.step, self.new_cache, self.context = step, new_cache, context
        lengths = [len(p) for p in prompts]
        longest = max(lengths)
        self.first = torch.tensor([longest - n for n in lengths], device=prompts[0].device)
        self.tokens = torch.stack([torch.cat((p.new_zeros(longest - len(p)), p)) for p in prompts])  # (B, total)
        self.cache: list[LayerCache] = []
        self._begin(min(longest, context))

    def _begin(self, kept: int) -> None:
        """Start with an empty cache and the last ``kept`` tokens as its next input."""
        self.unseen = self.tokens[:, -kept:]
        first = (self.first - (self.tokens.shape[1] - kept)).clamp(min=0)
        self.cache = self.new_cache(first if first.any() else None)

    def logits(self) -> Tensor:
        """Return the logits of each sample's next token, (B, vocabulary)."""
        if self.cache[0].length + self.unseen.shape[1] > self.context:
            self._begin(max(1, self.context // 2))
        return self.step(self.unseen, self.cache)[:, -1]

    def add(self, tokens: Tensor, samples: Tensor | None = None) -> None:
        """Append one token to each sequence, (B,); if given, first keep the sequences of indices ``samples``, (B,)."""
        if samples is not None:
            self.tokens, self.first = self.tokens[samples], self.first[samples]
            for layer in self.cache:
                layer.pick(samples)
        self.unseen = tokens.unsqueeze(1)
        self.tokens = torch.cat((self.tokens, self.unseen), 1)

    def of(self, sample: int) -> Tensor:
        """Return a prompt and its continuation, without padding."""
        return self.tokens[sample, int(self.first[sample]) :]


def sample(
    sequences: Sequences, new_tokens: int, choice: Choice, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Sample up to ``new_tokens`` tokens for each sequence, and return the sequences, cut after their stop tokens."""
    total = sequences.tokens.shape[1]
    stops = torch.tensor(choice.stop, device=sequences.tokens.device)
    batch = len(sequences.tokens)
    lengths = torch.full((batch,), total + new_tokens, device=sequences.tokens.device)
    for n in range(total, total + new_tokens):
        tokens = choice.pick(sequences.logits(), generator)
        done = lengths <= n
        tokens = torch.where(done, sequences.tokens[:, -1], tokens)
        sequences.add(tokens)
        lengths = torch.where(torch.isin(tokens, stops) & ~done, n + 1, lengths)
        if choice.stop and (lengths <= n + 1).all():
            break
    cut = (lengths - sequences.first).tolist()
    return [sequences.of(b)[: cut[b]] for b in range(batch)]


def search(sequences: Sequences, new_tokens: int, choice: Choice) -> list[Tensor]:
    """Return the most probable sequence that beam search finds for each prompt."""
    batch, width, prompt = len(sequences.tokens), choice.beams, sequences.tokens.shape[1]
    device = sequences.tokens.device
    scores = torch.zeros(batch, 1, device=device)  # (B, beams): Σ log p
    lengths = torch.zeros(batch, 1, device=device)
    done = torch.zeros(batch, 1, dtype=torch.bool, device=device)
    stops = torch.tensor(choice.stop, device=device)
    for n in range(new_tokens):
        log_p = torch.log_softmax(sequences.logits().float(), -1).view(batch, scores.shape[1], -1)
        vocabulary = log_p.shape[2]
        last = sequences.tokens[:, -1].view(batch, -1, 1)
        is_last = torch.arange(vocabulary, device=device) == last
        # a finished beam repeats its last token with log p = 0
        log_p = torch.where(done[..., None], torch.where(is_last, 0.0, -torch.inf), log_p)
        total = (scores[..., None] + log_p).flatten(1)  # (B, beams · vocabulary)
        scores, chosen = total.topk(min(width, total.shape[1]))
        beam, token = chosen // vocabulary, chosen % vocabulary
        finished = done.gather(1, beam)
        lengths = torch.where(finished, lengths.gather(1, beam), float(n + 1))
        done = finished | torch.isin(token, stops)
        offset = torch.arange(batch, device=device)[:, None] * (len(sequences.tokens) // batch)
        sequences.add(token.flatten(), (beam + offset).flatten())
        if done.all():
            break
    best = (scores / lengths.clamp(min=1) ** choice.length_penalty).argmax(1)  # (B,)
    rows = torch.arange(batch, device=device) * scores.shape[1] + best
    ends = prompt + lengths.gather(1, best[:, None]).squeeze(1).long()
    return [sequences.of(int(b))[: int(end - sequences.first[b])] for b, end in zip(rows, ends, strict=True)]
