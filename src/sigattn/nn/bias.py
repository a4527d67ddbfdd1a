"""Modules for the bias b of sigmoid attention (App. E, App. ASR).

Each is called with the number of queries and keys, and returns the ``bias`` of ``sigmoid_attention``: a number, or a
tensor that broadcasts to (B, Hq, N, 1).

``sigattn.nn.bias_rules`` has the names of biases in configurations.

With ``normalize`` the rules of a number of keys are 6 less, as in the operators; numbers and parameters are not.

With a KV cache, the number of keys grows from call to call. ``BatchLengthBias`` and ``SampleLengthBias`` grow with it,
so that a query's bias in generation differs from that in training. The other biases are the same in both.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from sigattn.ops import scalars
from sigattn.ops.problem import NORMALIZED_MARGIN, log_length_bias, log_size_bias


class AttentionBias(nn.Module):
    """Base class of the biases.

    Attributes:
        needs_lengths: True if each sample's length must be given.
        needs_visible: True if the number of keys that each query sees must be given.
        needs_alibi: True if that number must be the sum of ALiBi's weights exp(-slope · distance) over these keys.
        is_rule: True for a rule of a number of keys, from which ``normalize`` subtracts 6, as in the operators.
        full_precision: True if FSDP must not gather the parameters in bfloat16: a bias that is rounded near -7.6
            changes every weight of the attention by up to 1.6 %.
    """

    needs_lengths = False
    needs_visible = False
    needs_alibi = False
    is_rule = False
    full_precision = True

    def forward(
        self, num_queries: int, num_keys: int, *, query_offset: int = 0, key_lengths: Tensor | None = None,
        device: torch.device, visible: int | Tensor | None = None,
    ) -> float | Tensor:  # fmt: skip
        """Return the bias of queries query_offset … query_offset + num_queries - 1.

        Args:
            num_queries, num_keys: numbers of queries and keys. query_offset: position of the first query.
            key_lengths: (B,), number of keys of each sample. device: of the result, if it is a tensor.
            visible: number of keys that each query sees, at least 1, (B or 1, Hq or 1, N or 1, 1) floating point, or an
                int for all queries; for biases with needs_visible. With needs_alibi, the sum of ALiBi's weights of
                these keys, above 0.
        """
        raise TypeError(f"{type(self).__name__} is abstract: use a subclass of sigattn.nn.bias")

    def of_call(self, b: float | Tensor, normalize: bool) -> float | Tensor:
        """Return the bias of a call, given the result of ``forward``: 6 less for a rule with ``normalize``."""
        return b - NORMALIZED_MARGIN if normalize and self.is_rule else b


class ConstantBias(AttentionBias):
    """Bias of one number for all heads and queries; 0.0 for no bias.

    Args:
        value: b.
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value: float = scalars.real(type(self).__name__, "value", value)
        if not math.isfinite(self.value):
            raise ValueError(f"{type(self).__name__}: value must be finite, got {value!r}")

    def forward(self, num_queries: int, num_keys: int, **_: Any) -> float:
        return self.value

    def extra_repr(self) -> str:
        return f"{self.value:.4g}"


class ContextLengthBias(ConstantBias):
    """Bias of -log of the context length, whatever the keys of a call: that of the paper's language models.

    Args:
        max_seq_len: length of the longest sequence, at least 1.
    """

    is_rule = True

    def __init__(self, max_seq_len: int) -> None:
        super().__init__(log_length_bias(max_seq_len))


class BatchLengthBias(AttentionBias):
    """Bias of -log M, where M is the number of keys of a call: the longest sequence of a batch."""

    is_rule = True

    def forward(self, num_queries: int, num_keys: int, *, device: torch.device, **_: Any) -> float | Tensor:
        """Return -log of the number of keys, a 0-d tensor while compiling."""
        return log_size_bias(num_keys, device)


class SampleLengthBias(AttentionBias):
    """Bias of -log of each sample's own length: that of the paper's speech models."""

    needs_lengths = True
    is_rule = True

    def forward(
        self, num_queries: int, num_keys: int, *, key_lengths: Tensor | None = None, device: torch.device, **_: Any
    ) -> Tensor:
        """Return -log of the lengths, which must be given: (B, 1, 1, 1) in float32."""
        if key_lengths is None:
            raise ValueError("SampleLengthBias is -log of each sample's length: pass key_lengths")
        key_lengths = key_lengths.to(device, torch.float32).clamp(min=1)
        return log_length_bias(key_lengths).view(-1, 1, 1, 1)


class VisibleKeysBias(AttentionBias):
    """Bias of -log of the number of keys that a query sees: i + 1 for query i of a causal layer without a window."""

    needs_visible = True
    is_rule = True

    def forward(self, *_: Any, visible: int | Tensor | None = None, **__: Any) -> float | Tensor:
        """Return -log of ``visible``, which must be given."""
        if visible is None:
            raise ValueError(f"{type(self).__name__} depends on the keys that each query sees: pass visible")
        return log_length_bias(visible)


class AlibiKeysBias(VisibleKeysBias):
    """Bias of -log of the sum of ALiBi's weights, exp(-slope · distance), over the keys that a query sees.

    It makes the sum of a row's sigmoid weights about 1 in every head where products of queries and keys are small, as
    softmax does. With -log n, or -log of the visible keys, the heads with steep slopes have a sum far below 1: of 256
    keys with a slope of 1/4, the sum is 4.5 / 256. The layer must have ``Alibi``.
    """

    needs_alibi = True


class VisibleKeysLinearBias(AttentionBias):
    """Bias of c + a · log(visible keys), with a learned constant c and slope a for each head.

    It starts as -log of the visible keys: a = -1. ``sigattn.convert`` fits it to -log of a softmax's denominator
    (``sigattn.conversion.fit``).

    Args:
        num_heads: number of query heads.
        initial: initial value of c.

    Attributes:
        constant: c, (num_heads,). slope: a, (num_heads,). Vectors, so that no optimiser decays them as a matrix.
    """

    needs_visible = True

    def __init__(self, num_heads: int, initial: float = 0.0) -> None:
        super().__init__()
        self.num_heads: int = num_heads
        self.initial: float = scalars.real(type(self).__name__, "initial", initial)
        self.constant: nn.Parameter = nn.Parameter(torch.empty(num_heads))
        self.slope: nn.Parameter = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.constant, self.initial)
        nn.init.constant_(self.slope, -1.0)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}" + (f", initial={self.initial:.4g}" if self.initial else "")

    def forward(self, *_: Any, visible: int | Tensor | None = None, **__: Any) -> Tensor:
        """Return the bias for ``visible``, which must be given: (B or 1, num_heads, N or 1, 1), at least float32."""
        if visible is None:
            raise ValueError(f"{type(self).__name__} depends on the keys that each query sees: pass visible")
        wide = torch.promote_types(self.constant.dtype, torch.float32)
        constant, slope = self.constant.to(wide), self.slope.to(wide)
        if not isinstance(visible, Tensor):  # one operator: calls of few tokens are short
            return torch.add(constant, slope, alpha=math.log(visible)).view(1, -1, 1, 1)
        return constant.view(-1, 1, 1) + slope.view(-1, 1, 1) * visible.to(wide).log()


class LearnableBias(AttentionBias):
    """Learned bias: one number for the layer, or one per head.

    The paper's learnable bias starts at -10 or -5 and is less stable than -log n (App. ASR).

    Args:
        initial: initial value, e.g. ``log_length_bias(max_seq_len)``.
        num_heads: number of query heads, for one bias per head; None for one bias.
    """

    def __init__(self, initial: float, num_heads: int | None = None) -> None:
        super().__init__()
        self.initial: float = scalars.real(type(self).__name__, "initial", initial)
        self.value: nn.Parameter = nn.Parameter(torch.empty(1 if num_heads is None else (num_heads, 1, 1)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.value, self.initial)

    def extra_repr(self) -> str:
        return f"initial={self.initial:.4g}, num_parameters={self.value.numel()}"

    def forward(self, num_queries: int, num_keys: int, **_: Any) -> Tensor:
        """Return the parameter, (1,) or (heads, 1, 1)."""
        return self.value


class QueryBias(LearnableBias):
    """Learned number added to every feature of Q, after its norm: "b = -5 in Q" (App. ASR, Table "asr-results").

    It changes a logit by b · Σ_d k_d / √D. If K has a LayerNorm, this is zero at first, because the features sum to
    zero as long as the norm's scale is uniform.

    Args:
        initial: initial value; -5 in the paper.
    """

    full_precision = False  # it is added to Q in Q's dtype, outside of a call for which FSDP would gather it

    def __init__(self, initial: float = -5.0) -> None:
        super().__init__(initial)


def as_bias(name: str, bias: Any) -> AttentionBias:
    """Return a bias as it is, and a finite number as a ``ConstantBias``; raise with the name for anything else."""
    if isinstance(bias, AttentionBias):
        return bias
    try:
        return ConstantBias(bias)
    except ValueError as error:
        raise ValueError(f"{name} must be finite, got {bias!r}") from error
    except TypeError as error:
        raise TypeError(
            f"{name} must be a number or a module of sigattn.nn.bias, such as VisibleKeysBias(), got "
            f"{bias!r}; make_bias creates the module of a rule's name"
        ) from error
