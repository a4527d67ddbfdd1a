"""Checks of the arguments of a call, with messages that restate them.

Only types, shapes, dtypes and devices are checked, not the values of tensors, so that the checks neither synchronise
nor break a compiled graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from sigattn.ops import scalars

_NAME = "sigmoid_attention"
_OTHER_LAYOUT = (
    "for tensors of (batch, length, heads, head_dim), as in flash-attn and triton-sigmoid, call sigattn.flash, or "
    "transpose: t.transpose(1, 2) (docs/coming-from.md)"
)


def describe(**arguments: Any) -> str:
    """Return a text of the arguments: shape, dtype and device of tensors, the value of others."""
    return ", ".join(
        f"{name} {scalars.describe(value)}" if isinstance(value, Tensor) else f"{name} = {value!r}"
        for name, value in arguments.items()
    )


def wrong(error: type[Exception], message: str, **arguments: Any) -> NoReturn:
    """Raise an error whose message restates these arguments."""
    raise error(f"{_NAME}: {message}; got {describe(**arguments)}")


def choice(name: str, value: Any, allowed: Sequence[str], caller: str = _NAME) -> None:
    """Raise ValueError unless value is None or one of the allowed strings."""
    if value is not None and value not in allowed:
        raise ValueError(f"{caller}: unknown {name} {value!r}; choose one of {', '.join(map(repr, allowed))} or None")


def tensors(query: Any, key: Any, value: Any) -> None:
    """Raise unless these are dense floating-point tensors of one dtype on one device."""
    given = {"query": query, "key": key, "value": value}
    for name, t in given.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{_NAME}: {name} must be a tensor, got {type(t).__name__}")
        if t.is_nested or t.layout is not torch.strided:
            wrong(TypeError, f"{name} must be a dense tensor: pad it and pass key_lengths", **{name: t.layout})
    if not query.is_floating_point():
        wrong(TypeError, "query, key and value must be floating point", **given)
    if not (query.dtype == key.dtype == value.dtype):
        wrong(TypeError, "query, key and value must have one dtype: convert with .to(dtype)", **given)
    if not (query.device == key.device == value.device):
        wrong(ValueError, "query, key and value must be on one device: move with .to(device)", **given)


def lengths_and_widths(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless the last two dimensions of query (…, N, D), key (…, M, D) and value (…, M, Dv) fit together."""
    given = {"query": query, "key": key, "value": value}
    if query.shape[-1] != key.shape[-1]:
        wrong(ValueError, "query and key must have the same head_dim (the last dimension)", **given)
    if key.shape[-2] != value.shape[-2]:
        wrong(ValueError, "key and value must have the same length (the last dimension but one)", **given)


def operands(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Raise unless query (B, Hq, N, D), key (B, Hkv, M, D) and value (B, Hkv, M, Dv) fit together."""
    tensors(query, key, value)
    given = {"query": query, "key": key, "value": value}
    if not (query.dim() == key.dim() == value.dim() == 4):
        wrong(ValueError, "query, key and value must have 4 dimensions, (batch, heads, length, head_dim)", **given)
    if not (query.shape[0] == key.shape[0] == value.shape[0]):
        wrong(ValueError, "query, key and value must have the same batch size (dimension 0)", **given)
    lengths_and_widths(query, key, value)
    if key.shape[1] != value.shape[1]:
        wrong(ValueError, "key and value must have the same number of heads (dimension 1)", **given)
    _heads(query.shape[1], key.shape[1], enable_gqa, given)


def _heads(of_query: int, of_key: int, enable_gqa: bool, given: dict[str, Tensor]) -> None:
    if of_query == of_key:
        return
    if not enable_gqa:
        wrong(
            ValueError,
            f"query has {of_query} heads and key {of_key}: pass enable_gqa=True if query heads share key heads",
            **given,
        )
    if of_key == 0 or of_query % of_key:
        wrong(ValueError, f"the {of_query} query heads are not a multiple of the {of_key} key heads", **given)


def options(
    query: Tensor,
    key: Tensor,
    attn_mask: Any,
    dropout_p: Any,
    bias: Any,
    window: Any,
    alibi_slopes: Any,
    key_lengths: Any,
    scale: Any,
) -> tuple[float, float | None, tuple[int, int] | None]:
    """Raise unless the optional arguments fit the operands; return dropout_p, scale and window as Python's numbers."""
    (batch, heads, n, _), m = query.shape, key.shape[2]
    if attn_mask is not None:
        _mask(attn_mask, query, key, (batch, heads, n, m))
    if bias is not None:
        _bias(bias, query, (batch, heads, n, 1))
    if alibi_slopes is not None:
        slopes(alibi_slopes, query, batch, heads)
    if key_lengths is not None:
        _lengths(key_lengths, key, batch)
    return numbers(_NAME, dropout_p, scale, window)


def numbers(caller: str, dropout_p: Any, scale: Any, window: Any) -> tuple[float, float | None, tuple[int, int] | None]:
    """Return a probability, a number or None, and a window or None, as Python's own; raise for anything else."""
    dropout_p = scalars.real(caller, "dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"{caller}: dropout_p is a probability in [0, 1), got {dropout_p!r}")
    if scale is not None:
        scale = scalars.real(caller, "scale", scale)
        if scale != scale:
            raise ValueError(f"{caller}: scale is NaN")
    return dropout_p, scale, None if window is None else _window(caller, window)


def softcap(value: Any, caller: str = _NAME) -> float:
    """Return a finite number, at least 0, as Python's own; raise for anything else."""
    value = scalars.real(caller, "softcap", value)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{caller}: softcap must be finite and at least 0 (0 is without a cap), got {value!r}")
    return value


def _same_device(name: str, t: Tensor, query: Tensor) -> None:
    if t.device != query.device:
        wrong(ValueError, f"{name} must be on the query's device: move it with .to(device)", query=query, **{name: t})


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Return True if a tensor of this shape can be expanded to the target."""
    if len(shape) > len(target):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(target), strict=False))


def layout_hint(query: Tensor, key: Tensor, mask: Any = None) -> str:
    """Return advice if the shapes may be those of (batch, length, heads, head_dim), else an empty string.

    Used for calls that fail only: a valid call does not show that its layout is wrong.
    """
    if query.dim() != 4 or key.dim() != 4:
        return ""
    lengths = (query.shape[1], key.shape[1])
    if mask is None:
        fits = query.shape[2] == key.shape[2] and lengths[0] != lengths[1]
    else:
        fits = mask.dim() >= 2 and tuple(mask.shape[-2:]) == lengths
    return f"; {_OTHER_LAYOUT}" if fits else ""


def _mask(mask: Any, query: Tensor, key: Tensor, target: Sequence[int]) -> None:
    if not isinstance(mask, Tensor):
        hint = f"; {_OTHER_LAYOUT}" if isinstance(mask, bool) else ""
        raise TypeError(f"{_NAME}: attn_mask must be a tensor, got {type(mask).__name__}{hint}")
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        wrong(TypeError, "attn_mask must be bool (True = attend) or floating point (added)", attn_mask=mask)
    if not broadcasts(mask.shape, target):
        wrong(
            ValueError,
            f"attn_mask does not broadcast to (B, Hq, N, M) = {tuple(target)}{layout_hint(query, key, mask)}",
            query=query,
            key=key,
            attn_mask=mask,
        )
    _same_device("attn_mask", mask, query)


def _bias(bias: Any, query: Tensor, target: Sequence[int]) -> None:
    if not isinstance(bias, Tensor):
        scalars.real(_NAME, "bias, if not a tensor,", bias)
        return
    if not bias.is_floating_point():
        wrong(TypeError, "bias must be floating point", bias=bias)
    if not broadcasts(bias.shape, target):
        advice = (
            "a bias per head is (Hq, 1, 1), per sample (B, 1, 1, 1), per query (N, 1); pass one per key as an additive "
            "attn_mask"
        )
        wrong(
            ValueError,
            f"bias does not broadcast to (B, Hq, N, 1) = {tuple(target)}: {advice}",
            query=query,
            bias=bias,
        )
    _same_device("bias", bias, query)


def bias_of_sequences(bias: Any, query: Tensor, batch: int, heads: int) -> Any:
    """Return the bias of nested sequences: a number, None, or a tensor (B or 1, Hq or 1).

    A tensor is passed as for dense queries, broadcastable to (B, Hq, 1, 1); others raise ValueError or TypeError.
    """
    if bias is None or not isinstance(bias, Tensor):
        if bias is not None:
            scalars.real(_NAME, "bias, if not a tensor,", bias)
        return bias
    if not bias.is_floating_point():
        wrong(TypeError, "bias must be floating point", bias=bias)
    if bias.is_nested or not broadcasts(bias.shape, (batch, heads, 1, 1)):
        message = f"the bias of nested tensors must broadcast to (B, Hq, 1, 1) = ({batch}, {heads}, 1, 1)"
        raise ValueError(f"{_NAME}: {message}, one for each sequence and head; got {tuple(bias.shape)}")
    _same_device("bias", bias, query)
    return bias[(None,) * (4 - bias.dim())][..., 0, 0]


def slopes(slopes: Any, query: Tensor, batch: int, heads: int) -> None:
    """Raise unless alibi_slopes fits this batch size and number of heads."""
    if not isinstance(slopes, Tensor) or not slopes.is_floating_point():
        raise TypeError(f"{_NAME}: alibi_slopes must be a floating-point tensor, got {scalars.describe(slopes)}")
    shape = tuple(slopes.shape)
    if shape not in (
        (heads,),
        (batch, heads),
        (batch, heads, 2),
        (1, heads, 2),
    ):  # not a set, because sizes may be symbolic
        wrong(
            ValueError,
            "alibi_slopes must be (Hq,), (B, Hq) or (B or 1, Hq, 2; one slope before, one after the query)",
            query=query,
            alibi_slopes=slopes,
        )
    _same_device("alibi_slopes", slopes, query)


def _lengths(lengths: Any, key: Tensor, batch: int) -> None:
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{_NAME}: key_lengths must be a tensor of integers, got {type(lengths).__name__}")
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype is torch.bool:
        wrong(TypeError, "key_lengths must be integers", key_lengths=lengths)
    if tuple(lengths.shape) != (batch,):
        wrong(ValueError, f"key_lengths must be (B,) = ({batch},)", key=key, key_lengths=lengths)


def _window(caller: str, window: Any) -> tuple[int, int]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{caller}: window must be a pair (left, right), got {window!r}")
    left, right = (scalars.integer(caller, "each side of window", side) for side in window)
    if left < -1 or right < -1:
        raise ValueError(
            f"{caller}: the sides of window must be at least 0, or -1 for unlimited, got {tuple(window)!r}"
        )
    return left, right
