"""Options shared by the functions of ``sigattn.flash``: validation, and conversion for the operators."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sigattn.ops import custom_ops, flash_checks, validation
from sigattn.ops.attention import autocast, bias_operand

LOG_LENGTH = "-log n"


def refuse(name: str, return_attn_probs: bool) -> None:
    """Raise for arguments of flash-attn that this library does not support."""
    if return_attn_probs:
        raise ValueError(
            f"{name}: return_attn_probs=True is not supported: a sigmoid has no log-sum-exp, and the weights are never "
            "stored; see sigattn.attention_statistics"
        )


def check(
    name: str,
    q: Tensor,
    batch: int,
    dropout_p: Any,
    scale: Any,
    window: Any,
    slopes: Any,
    bias: Any,
    backend: Any,
) -> tuple[float, float | None, tuple[int, int] | None]:
    """Raise unless the optional arguments fit q; return dropout_p, scale and window as ``numbers`` does."""
    validation.choice("backend", backend, tuple(custom_ops.KERNELS), name)
    given = numbers(name, dropout_p, scale, window)
    if not (isinstance(bias, str) and bias == LOG_LENGTH):
        flash_checks.bias(name, bias, q, batch)
    if slopes is not None:
        flash_checks.slopes(name, slopes, q, batch)
    return given


def numbers(name: str, dropout_p: Any, scale: Any, window: Any) -> tuple[float, float | None, tuple[int, int] | None]:
    """Return dropout_p, softmax_scale and window_size as Python numbers; raise for anything else."""
    if isinstance(dropout_p, bool) or isinstance(scale, bool):
        raise TypeError(
            f"{name}: dropout_p and softmax_scale must be numbers, got {dropout_p!r} and {scale!r}; flash-attn 3's "
            "order (q, k, v, softmax_scale, causal, …) is that of sigattn.flash.v3"
        )
    return validation.numbers(name, dropout_p, scale, window)


def cast(t: Tensor) -> Tensor:
    """Return t in autocast's dtype if autocast is enabled for its device."""
    return autocast(t) if custom_ops.is_autocast_enabled(t.device.type) else t


def packed_bias(bias: float | str | Tensor, q: Tensor) -> Tensor | None:
    """Return the bias for packed sequences: None for "-log n", 0-d for a number, or (B or 1, Hq or 1)."""
    if isinstance(bias, str):
        return None
    return _per_sequence(bias) if isinstance(bias, Tensor) else bias_operand(bias, q, 2)


def dense_bias(bias: float | str | Tensor) -> float | Tensor | None:
    """Return the bias for ``sigmoid_attention``: None for "-log n", a number, or (B or 1, Hq or 1, 1, 1)."""
    if not isinstance(bias, Tensor):
        return None if isinstance(bias, str) else bias
    return _per_sequence(bias)[..., None, None]


def _per_sequence(bias: Tensor) -> Tensor:
    """Return a bias of shape (), (Hq,) or (B, Hq) with two dimensions."""
    return bias.reshape(1, 1) if bias.dim() == 0 else bias.unsqueeze(-1) if bias.dim() == 1 else bias
