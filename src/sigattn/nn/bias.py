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

With a KV cache, the number of keys grows from call to call. ``BatchLengthBias`` and ``SampleLengthBias`` then follow
it: a model that is to generate must have been trained on every length. The others give a query what it had in training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sigattn.ops.problem import log_length_bias


class AttentionBias(nn.Module):
    """What all of them share.

    Attributes:
        needs_lengths: whether each sample's length must be given.
        needs_causal: whether it has a meaning under a causal mask only.
    """

    needs_lengths = False
    needs_causal = False

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

    def forward(
        self, queries: int, keys: int, *, first_query: int = 0, lengths: Tensor | None = None, device: torch.device
    ) -> float:
        """-log M."""
        return log_length_bias(max(keys, 1))


class SampleLengthBias(AttentionBias):
    """-log of each sample's own length."""

    needs_lengths = True

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
        self.value = nn.Parameter(torch.empty(() if heads is None else (heads, 1, 1)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to where it starts."""
        nn.init.constant_(self.value, self.initial)

    def forward(
        self, queries: int, keys: int, *, first_query: int = 0, lengths: Tensor | None = None, device: torch.device
    ) -> Tensor:
        """(), or (heads, 1, 1)."""
        return self.value


def as_bias(bias: AttentionBias | float) -> AttentionBias:
    """A number as an object."""
    return bias if isinstance(bias, AttentionBias) else ConstantBias(bias)
