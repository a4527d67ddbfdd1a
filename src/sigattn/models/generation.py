"""Generation token by token, for batches of prompts of any lengths."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sigattn.nn.kv_cache import KVCache
from sigattn.validation import SettingsError, check_at_least, check_not_negative


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Options of sampling; SettingsError, a ValueError, for a number out of its range.

    Attributes:
        temperature: divisor of the logits, None for 1; 0 for greedy decoding.
        top_k: number of most probable tokens to sample from; None for all.
        top_p: probability of the smallest set of most probable tokens to sample from; None for all.
        stop_tokens: tokens that end a sequence.
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
        """Draw one token of each row of logits, (B, vocabulary) → (B,)."""
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


def sample(
    model: Any, prompts: list[Tensor], max_new_tokens: int, config: SamplingConfig,
    generator: torch.Generator | None = None,
) -> list[Tensor]:  # fmt: skip
    """Add up to ``max_new_tokens`` tokens to each prompt; return the sequences, cut after their stop tokens.

    Prompts of different lengths are padded on the left; padding is masked. When a sequence exceeds the context of the
    ``LanguageModel``, it starts again from the last half of the context; the others keep theirs.
    """
    device, max_seq_len = prompts[0].device, model.config.max_seq_len
    tokens = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")  # (B, total)
    prompt_lengths = torch.tensor([len(p) for p in prompts], device=device)
    total = tokens.shape[1]
    ends = torch.full_like(prompt_lengths, total + max_new_tokens)
    stops = torch.tensor(config.stop_tokens, device=device)
    seen = prompt_lengths.clamp(max=max_seq_len)  # number of tokens of each sequence that the model attends to
    cache: list[KVCache] = []
    inputs = tokens
    for n in range(total, total + max_new_tokens):
        if not cache or cache[0].length == max_seq_len:
            seen = torch.where(seen > max_seq_len, max(1, max_seq_len // 2), seen)
            longest = int(seen.max())
            padding = longest - seen
            cache = model.new_kv_cache(padding if padding.any() else None)
            inputs = tokens[:, -longest:]
        drawn = config.sample_token(model(inputs, cache)[:, -1], generator)
        has_ended = ends <= n
        drawn = torch.where(has_ended, tokens[:, -1], drawn)
        inputs = drawn.unsqueeze(1)
        tokens, seen = torch.cat((tokens, inputs), 1), seen + 1
        ends = torch.where(torch.isin(drawn, stops) & ~has_ended, n + 1, ends)
        if config.stop_tokens and (ends <= n + 1).all():
            break
    return [row[total - length : end] for row, length, end in zip(tokens, prompt_lengths, ends, strict=True)]
