"""Generation token by token, for batches of prompts of any lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sigattn.nn.kv_cache import KVCache
from sigattn.validation import SettingsError, check_at_least, check_not_negative

Step = Callable[[Tensor, "list[KVCache]"], Tensor]  # new tokens (B, n) and a cache → logits (B, n, vocabulary)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Options of sampling.

    Attributes:
        temperature: divisor of the logits, None for 1; 0 for greedy decoding.
        top_k: number of most probable tokens to sample from; None for all.
        top_p: probability of the smallest set of most probable tokens to sample from; None for all.
        stop_tokens: tokens that end a sequence.

    Raises:
        SettingsError: a ValueError, for numbers out of range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_not_negative(self, "temperature")
        check_at_least(1, self, "top_k")
        check_at_least(0, self, "stop_tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SettingsError(f"top_p must lie in (0, 1], got {self.top_p}")

    def sample_token(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw one token of each row of logits, (B, vocabulary); return (B,)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / (1.0 if self.temperature is None else self.temperature)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        weights = torch.softmax(logits, dim=-1)
        if self.top_p is not None:
            ordered, order = weights.sort(descending=True)
            excluded = ordered.cumsum(-1) - ordered >= self.top_p  # the more probable tokens have top_p already
            weights = torch.zeros_like(weights).scatter(-1, order, ordered.masked_fill(excluded, 0))
        return torch.multinomial(weights, 1, generator=generator).squeeze(-1)


class GenerationState:
    """Prompts with their continuations, and the key/value cache of the model.

    When a sequence exceeds the context, it starts again from the last half of the context; the others keep theirs.
    Prompts of different lengths are padded on the left; padding is masked.

    Args:
        step: the model. new_kv_cache: function from the left padding of each sample (None: all 0) to an empty cache.
        prompts: at least one token each. max_seq_len: length of the longest sequence.
    """

    max_seq_len: int
    new_kv_cache: Callable[[Tensor | None], list[KVCache]]
    step: Step
    tokens: Tensor
    unseen: Tensor

    def __init__(
        self,
        step: Step,
        new_kv_cache: Callable[[Tensor | None], list[KVCache]],
        prompts: list[Tensor],
        max_seq_len: int,
    ) -> None:
        self.step, self.new_kv_cache, self.max_seq_len = step, new_kv_cache, max_seq_len
        lengths = [len(p) for p in prompts]
        longest = max(lengths)
        self.left_padding: Tensor = torch.tensor([longest - n for n in lengths], device=prompts[0].device)
        self.tokens = torch.stack([torch.cat((p.new_zeros(longest - len(p)), p)) for p in prompts])  # (B, total)
        self.cache: list[KVCache] = []
        self._restart((longest - self.left_padding).clamp(max=max_seq_len))

    def _restart(self, lengths: Tensor) -> None:
        """Start with an empty cache and the last ``lengths`` tokens of each sequence, (B,), as its next input."""
        longest = int(lengths.max())
        self.unseen = self.tokens[:, -longest:]
        padding = longest - lengths
        self.cache = self.new_kv_cache(padding if padding.any() else None)

    def logits(self) -> Tensor:
        """Return the logits of each sample's next token, (B, vocabulary)."""
        total = self.cache[0].length + self.unseen.shape[1]
        if total > self.max_seq_len:
            padding = self.cache[0].left_padding
            lengths = total - (torch.zeros_like(self.left_padding) if padding is None else padding)
            self._restart(torch.where(lengths > self.max_seq_len, max(1, self.max_seq_len // 2), lengths))
        return self.step(self.unseen, self.cache)[:, -1]

    def add(self, tokens: Tensor) -> None:
        """Append one token to each sequence, (B,)."""
        self.unseen = tokens.unsqueeze(1)
        self.tokens = torch.cat((self.tokens, self.unseen), 1)

    def sequence(self, sample: int) -> Tensor:
        """Return a prompt and its continuation, without padding."""
        return self.tokens[sample, int(self.left_padding[sample]) :]


def sample(
    state: GenerationState, max_new_tokens: int, config: SamplingConfig, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Sample up to ``max_new_tokens`` tokens for each sequence; return the sequences, cut after their stop tokens."""
    total = state.tokens.shape[1]
    stops = torch.tensor(config.stop_tokens, device=state.tokens.device)
    batch = len(state.tokens)
    lengths = torch.full((batch,), total + max_new_tokens, device=state.tokens.device)
    for n in range(total, total + max_new_tokens):
        tokens = config.sample_token(state.logits(), generator)
        done = lengths <= n
        tokens = torch.where(done, state.tokens[:, -1], tokens)
        state.add(tokens)
        lengths = torch.where(torch.isin(tokens, stops) & ~done, n + 1, lengths)
        if config.stop_tokens and (lengths <= n + 1).all():
            break
    cut = (lengths - state.left_padding).tolist()
    return [state.sequence(b)[: cut[b]] for b in range(batch)]
