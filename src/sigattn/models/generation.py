"""Continuing prompts token by token: sampling and beam search, over batches of prompts of any lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sigattn.nn.cache import LayerCache
from sigattn.validation import SettingsError, check_at_least, check_finite, check_not_negative

Step = Callable[[Tensor, "list[LayerCache]"], Tensor]  # new tokens (B, n) and a cache → logits (B, n, vocabulary)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How the next token is chosen.

    Attributes:
        temperature: that logits are divided by; 0 for the likeliest token.
        top_k: only the so many likeliest tokens; None for all.
        top_p: only the likeliest tokens that together have this probability (at least one); None for all.
        beams: above 1, beam search: so many continuations are followed, and the likeliest is given.
        length_penalty: beam search compares Σ log p / length^this.
        stop: tokens after which a sequence ends.

    Raises:
        SettingsError: a ValueError, for numbers out of range, or sampling together with beams.
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
                f"beam search does not sample: with beams={self.beams} say temperature=0, and leave out top_k and top_p"
            )

    def pick(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """(B, vocabulary) → (B,)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        weights = torch.softmax(logits, dim=-1)
        if self.top_p is not None:
            ordered, places = weights.sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p  # what comes before a token suffices already
            weights = torch.zeros_like(weights).scatter(-1, places, ordered.masked_fill(beyond, 0))
        return torch.multinomial(weights, 1, generator=generator).squeeze(-1)


class Sequences:
    """Prompts and what was added to them, and a cache that is fed as it is needed.

    Past the context the model starts again from the last half of it. Prompts of different lengths are padded on the
    left; padding is never seen.

    Args:
        step: the model. new_cache: an empty cache for samples that begin so late (None: all at 0).
        prompts: of at least one token each. context: the longest sequence.
    """

    def __init__(
        self, step: Step, new_cache: Callable[[Tensor | None], list[LayerCache]], prompts: list[Tensor], context: int
    ) -> None:
        self.step, self.new_cache, self.context = step, new_cache, context
        lengths = [len(p) for p in prompts]
        most = max(lengths)
        self.first = torch.tensor([most - n for n in lengths], device=prompts[0].device)
        self.tokens = torch.stack([torch.cat((p.new_zeros(most - len(p)), p)) for p in prompts])  # (B, total)
        self.cache: list[LayerCache] = []
        self._begin(min(most, context))

    def _begin(self, kept: int) -> None:
        """Start with an empty cache, and the last tokens still to be seen."""
        self.unseen = self.tokens[:, -kept:]
        first = (self.first - (self.tokens.shape[1] - kept)).clamp(min=0)
        self.cache = self.new_cache(first if first.any() else None)

    def logits(self) -> Tensor:
        """Of the next token of each sample, (B, vocabulary)."""
        if self.cache[0].length + self.unseen.shape[1] > self.context:
            self._begin(max(1, self.context // 2))
        return self.step(self.unseen, self.cache)[:, -1]

    def add(self, tokens: Tensor, samples: Tensor | None = None) -> None:
        """One token (B,) to each sample; or to these samples, with which to go on."""
        if samples is not None:
            self.tokens, self.first = self.tokens[samples], self.first[samples]
            for layer in self.cache:
                layer.pick(samples)
        self.unseen = tokens.unsqueeze(1)
        self.tokens = torch.cat((self.tokens, self.unseen), 1)

    def of(self, sample: int) -> Tensor:
        """A prompt and what was added to it."""
        return self.tokens[sample, int(self.first[sample]) :]


def sample(
    sequences: Sequences, new_tokens: int, choice: Choice, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Add tokens one by one; a sequence that stopped keeps its last token, and is cut there in the end."""
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
    """The likeliest of the continuations that beam search follows."""
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
        stay = torch.arange(vocabulary, device=device) == last  # a finished beam repeats its last token, at no cost
        log_p = torch.where(done[..., None], torch.where(stay, 0.0, -torch.inf), log_p)
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
    ours = torch.arange(batch, device=device) * scores.shape[1] + best
    ends = prompt + lengths.gather(1, best[:, None]).squeeze(1).long()
    return [sequences.of(int(b))[: int(end - sequences.first[b])] for b, end in zip(ours, ends, strict=True)]
