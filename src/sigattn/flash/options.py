"""Options shared by the functions of ``sigattn.flash``: validation, and conversion for the operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from sigattn.flash import validation as flash_validation
from sigattn.ops import validation

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
    backends: Iterable[str],
) -> tuple[float, float | None, tuple[int, int] | None]:
    """Raise unless the optional arguments fit q; return dropout_p, scale and window as ``numbers`` does."""
    validation.choice(name, "backend", backend, tuple(backends))
    given = numbers(name, dropout_p, scale, window)
    if not (isinstance(bias, str) and bias == LOG_LENGTH):
        flash_validation.bias(name, bias, q, batch)
    if slopes is not None:
        validation.slopes(name, slopes, q, batch, q.shape[-2], two_sided=False)
    return given


def numbers(name: str, dropout_p: Any, scale: Any, window: Any) -> tuple[float, float | None, tuple[int, int] | None]:
    """Return dropout_p, softmax_scale and window_size as Python numbers; raise for anything else."""
    if isinstance(dropout_p, bool) or isinstance(scale, bool):
        raise TypeError(
            f"{name}: dropout_p and softmax_scale must be numbers, got {dropout_p!r} and {scale!r}; flash-attn 3's "
            "order (q, k, v, softmax_scale, causal, …) is that of sigattn.flash.v3"
        )
    return validation.numbers(name, dropout_p, scale, window)


def operator_bias(bias: float | Tensor) -> float | Tensor:
    """Return the bias as the operators take it: a number, or (B or 1, Hq or 1, N or 1, 1)."""
    if not isinstance(bias, Tensor):
        return bias
    shapes = {0: (1, 1, 1, 1), 1: (-1, 1, 1, 1), 2: (*bias.shape, 1, 1), 3: (*bias.shape, 1)}
    return bias.reshape(shapes[bias.dim()])
