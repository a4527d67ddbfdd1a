"""The bias b of sigmoid attention, as objects that say what they are (App. E, App. ASR).

Each is called with how many queries and keys there are, and gives what ``sigmoid_attention`` takes as ``bias``: a
number, or a tensor that broadcasts to (B, Hq, N, 1).

    NoBias                      0
    ConstantBias(value)         a number
    ContextLengthBias(context)  -log of the longest sequence the model was made for: the paper's language models
    BatchLengthBias()           -log of the number of keys, the batch's longest sequence: its other way for speech
    SampleLengthBias()          -log of each sample's own length, which must be given: its speech models
    VisibleKeysBias()           -log of the keys that each query sees, under a causal mask
    LearnableBias(initial, …)   a parameter, one for the layer or one per head
    QueryBias(initial)          a parameter added to Q instead of to the logits

With a KV cache, the number of keys grows from call to call. ``BatchLengthBias`` and ``SampleLengthBias`` then follow
it (``cache_safe`` is False), so that generating differs from what was trained. The others give a query what it had in
training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sigattn.ops.problem import log_length_bias


class AttentionBias(nn.Module):
    """What all of them share.

    Attributes:
        needs_lengths: whether each sample's length must be given.
        needs_causal: whether it has a meaning under a causal mask only.
        cache_safe: whether a query gets the same bias when keys before it come from a cache.
    """

    needs_lengths = False
    needs_causal = False
    cache_safe = True

    def forward(
        self, queries: int, keys: int, *, first_query: int = 0, lengths: Tensor | None = None, device: torch.device
    ) -> float | Tensor:
        """The bias for queries first_query … first_query + queries - 1 against so many keys.

        lengths: (B,), how many keys each sample has.
        """
        raise TypeError(f"{type(self).__name__} is no bias by itself: take one of those in sigattn.nn.bias")


class NoBias(AttentionBias):
    """b = 0. Attention outputs then start about n/2 times as large as softmax's: mind the norms around it."""

    def forward(
        self, queries: int, keys: int, *, first_query: int = 0, lengths: Tensor | None = None, device: torch.device
    ) -> float:
        """0."""
        return 0.0


class ConstantBias(AttentionBias):
    """The same number everywhere.

    Args:
        value: b.
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = float(value)

    def forward(
        self, queries: int, keys: int, *, first_query: int = 0, lengths: Tensor | None = None, device: torch.device
    ) -> float:
        """The number."""
        return self.value

    def extra_repr(self) -> str:
        """The number."""
        return f"{self.value:.4g}"


class ContextLengthBias(ConstantBias):
    """-log of the context length, whatever the length of a call.

    Args:
        context: the longest sequence, at least 1.
    """

    def __init__(self, context: int) -> None:
        super().__init__(log_length_bias(context))


class BatchLengthBias(AttentionBias):
    """-log of the number of keys of a call."""

    cache_safe = False

    def forward(
        self, queries: int, keys: int, *, first_query: int = 0, lengths: Tensor | None = None, device: torch.device
    ) -> float:
        """-log M."""
        return log_length_bias(max(keys, 1))


class SampleLengthBias(AttentionBias):
    """-log of each sample's own length."""

    needs_lengths = True
    cache_safe = False

    def forward(
        self, queries: int, keys: int, *, first_query: int = 0, lengths: Tensor | None = None, device: torch.device
    ) -> Tensor:
        """(B, 1, 1, 1), float32.

        Raises:
            ValueError: without lengths.
        """
        if lengths is None:
            raise ValueError("SampleLengthBias is -log of each sample's length: pass key_lengths")
        lengths = lengths.to(device, torch.float32).clamp(min=1)  # an empty sample has no key to weigh
        return log_length_bias(lengths).view(-1, 1, 1, 1)


class VisibleKeysBias(AttentionBias):
    """-log of the number of keys that a query sees: i + 1 for query i, or as many as a window lets it see.

    Args:
        window: how many keys before itself a query sees at most; None for all.
    """

    needs_causal = True

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(
        self, queries: int, keys: int, *, first_query: int = 0, lengths: Tensor | None = None, device: torch.device
    ) -> Tensor:
        """(N, 1), float32."""
        visible = torch.arange(first_query + 1, first_query + queries + 1, device=device, dtype=torch.float32)
        if self.window is not None:
            visible = visible.clamp(max=self.window + 1)
        return log_length_bias(visible).unsqueeze(-1)


class LearnableBias(AttentionBias):
    """A parameter: one number for the layer, or one per head.

    The paper's learnable bias starts at -10 or -5 and is less stable than -log n (App. ASR).

    Args:
        initial: where it starts, e.g. ``log_length_bias(context)``.
        heads: number of query heads, for one each; None for one in all.
    """

    def __init__(self, initial: float, heads: int | None = None) -> None:
        super().__init__()
        self.initial = float(initial)
        self.value = nn.Parameter(torch.empty(1 if heads is None else (heads, 1, 1)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to where it starts."""
        nn.init.constant_(self.value, self.initial)

    def forward(
        self, queries: int, keys: int, *, first_query: int = 0, lengths: Tensor | None = None, device: torch.device
    ) -> Tensor:
        """(1,), or (heads, 1, 1)."""
        return self.value


class QueryBias(LearnableBias):
    """A learned number added to every feature of Q, after its norm: "b = -5 in Q" (App. ASR, Table "asr-results").

    A logit then moves by b · Σ_d k_d / √D. Where K has a LayerNorm, whose features sum to zero while its scale is even,
    that is nothing at first.

    Args:
        initial: where it starts; -5 in the paper.
    """

    def __init__(self, initial: float = -5.0) -> None:
        super().__init__(initial)

    def added_to(self, query: Tensor) -> Tensor:
        """Q + b."""
        return query + self.value.to(query.dtype)


Rule = Literal["log_context", "log_batch", "log_sample", "log_visible"]
Learn = Literal["no", "layer", "head", "query"]


def make_bias(
    rule: float | Rule, *, learn: Learn = "no", context: int | None = None, heads: int, window: int | None = None
) -> AttentionBias:
    """The bias that a configuration names.

    Args:
        rule: a number, or "log_context" (-log of ``context``), "log_batch" (of the keys of a call), "log_sample" (of
            each sample's own length) or "log_visible" (of the keys a query sees, under a causal mask).
        learn: "no"; or where it is learned, starting from a number or "log_context": one for the "layer", one per
            "head", or one added to the "query".
        context: the longest sequence.
        heads: number of query heads.
        window: for "log_visible", the attention's window.

    Raises:
        ValueError: for anything else.
    """
    if rule == "log_context":
        if context is None:
            raise ValueError('bias="log_context" is -log of the longest sequence, which this model does not have')
        rule = log_length_bias(context)
    if isinstance(rule, str):
        if learn != "no":
            raise ValueError(f'a learned bias starts from a number or "log_context", got {rule!r}')
        rules: dict[str, Callable[[], AttentionBias]] = {
            "log_batch": BatchLengthBias,
            "log_sample": SampleLengthBias,
            "log_visible": lambda: VisibleKeysBias(window),
        }
        if rule not in rules:
            raise ValueError(f"bias must be a number or one of {get_args(Rule)}, got {rule!r}")
        return rules[rule]()
    if learn == "no":
        return ConstantBias(rule)
    if learn == "query":
        return QueryBias(rule)
    if learn not in get_args(Learn):
        raise ValueError(f"learn must be one of {get_args(Learn)}, got {learn!r}")
    return LearnableBias(rule, heads if learn == "head" else None)


def as_bias(bias: AttentionBias | float) -> AttentionBias:
    """A number as an object."""
    return bias if isinstance(bias, AttentionBias) else ConstantBias(bias)
