"""Conversion of shapes that ``F.scaled_dot_product_attention`` accepts and the backends do not, to four dimensions.

PyTorch's function uses ``torch.matmul``, so query, key and value may have any number of leading dimensions, and these
broadcast. With ``enable_gqa`` the third dimension from the end, the heads, does not broadcast: there key and value
heads are repeated to the number of query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigattn.ops import validation

_NAME = "sigmoid_attention"


class Batched(NamedTuple):
    """Arguments with one batch dimension, and the shape to which the output (B, Hq, N, Dv) is reshaped."""

    query: Tensor  # (B, Hq, N, D)
    key: Tensor  # (B, Hkv, M, D), Hq a multiple of Hkv
    value: Tensor  # (B, Hkv, M, Dv)
    attn_mask: Tensor | None  # broadcastable to (B, Hq, N, M)
    bias: Any  # a number, None, or broadcastable to (B, Hq, N, 1)
    alibi_slopes: Tensor | None  # (B or 1, Hq, 2)
    key_lengths: Tensor | None  # (B,)
    shape: tuple[int, ...]


def flatten(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    bias: Any,
    alibi_slopes: Any,
    key_lengths: Any,
    enable_gqa: bool,
) -> Batched:
    """Expand the leading dimensions to those of the output and flatten them into one batch dimension.

    Nothing is copied unless only some of several leading dimensions broadcast, or key and value have different numbers
    of heads, more than one each.

    Raises:
        ValueError: shapes that do not broadcast; the message restates the call.
        TypeError: tensors of mixed or unsupported dtypes.
    """
    operands = {"query": query, "key": key, "value": value}
    validation.tensors(_NAME, **operands)
    if min(t.dim() for t in operands.values()) < 2:
        message = "query, key and value must have at least 2 dimensions, (length, head_dim)"
        validation.raise_error(_NAME, ValueError, message, **operands)
    validation.head_dims(_NAME, **operands)
    if key.shape[-2] != value.shape[-2]:
        message = "key and value must have the same length (the last dimension but one)"
        validation.raise_error(_NAME, ValueError, message, **operands)
    rank = max(t.dim() for t in operands.values())
    if enable_gqa and min(t.dim() for t in operands.values()) < 3:
        validation.raise_error(
            _NAME, ValueError, "enable_gqa needs a dimension of heads, the third from the end", **operands
        )
    query, key, value = (t if t.dim() > 2 else t.unsqueeze(0) for t in (query, key, value))
    lead = _leading(query, key, value, operands)
    heads = _number_of_heads(query, key, value, enable_gqa, operands)
    query = query if query.shape[-3] == heads else query.expand(*query.shape[:-3], heads, *query.shape[-2:])
    if key.shape[-3] != value.shape[-3] or not heads:
        key, value = (_repeat(t, heads) for t in (key, value))
    full = (*lead, heads, query.shape[-2])
    inner = 3 if rank > 2 else 2  # dimensions of one sample of the output
    return Batched(
        _one_batch(query, lead),
        _one_batch(key, lead),
        _one_batch(value, lead),
        _expanded("attn_mask", attn_mask, (*full, key.shape[-2]), lead, rank, operands),
        _expanded("bias", bias, (*full, 1), lead, rank, operands),
        _slopes(alibi_slopes, lead, heads, operands),
        _lengths(key_lengths, lead, operands),
        (*lead, *(heads, query.shape[-2], value.shape[-1])[-inner:]),
    )


def _leading(query: Tensor, key: Tensor, value: Tensor, operands: dict[str, Tensor]) -> tuple[int, ...]:
    """Return the leading dimensions of the output, those before its heads."""
    try:
        return tuple(torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value))))
    except RuntimeError:
        message = "query, key and value must have the same batch size, or 1 (the dimensions before the last three)"
        validation.raise_error(_NAME, ValueError, message, **operands)


def _number_of_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, operands: dict[str, Tensor]) -> int:
    """Return the number of heads of the output."""
    heads, of_key, of_value = (t.shape[-3] for t in (query, key, value))
    if enable_gqa:
        for name, count in (("key", of_key), ("value", of_value)):
            if heads != count and (not heads or not count or heads % count):
                message = f"the {heads} query heads are not a multiple of the {count} {name} heads"
                validation.raise_error(_NAME, ValueError, message, **operands)
        return heads
    several = [count for count in (heads, of_key, of_value) if count != 1]
    if any(count != several[0] for count in several):
        if of_key != of_value and 1 not in (of_key, of_value):
            message = "key and value must have the same number of heads, or 1 (third dimension from the end)"
            validation.raise_error(_NAME, ValueError, message, **operands)
        count = of_value if of_key == 1 else of_key
        message = f"query has {heads} heads and key {count}: pass enable_gqa=True if query heads share key heads"
        validation.raise_error(_NAME, ValueError, message + validation.layout_hint(query, key), **operands)
    return several[0] if several else 1


def _repeat(t: Tensor, heads: int) -> Tensor:
    """Repeat each head of t (…, H, L, E) to the given number of heads, a view where H is 1."""
    if t.shape[-3] == heads:
        return t
    return t.unsqueeze(-3).expand(*t.shape[:-2], heads // t.shape[-3], *t.shape[-2:]).flatten(-4, -3)


def _one_batch(t: Tensor, lead: Sequence[int]) -> Tensor:  # (…, a, b, c) → (B, a, b, c)
    t = t.expand(*lead, *t.shape[-3:])
    return t.flatten(0, len(lead) - 1) if lead else t.unsqueeze(0)


def _expanded(
    name: str, t: Any, target: Sequence[int], lead: Sequence[int], rank: int, operands: dict[str, Tensor]
) -> Any:
    """Return a mask or bias with one batch dimension, of size 1 if all leading dimensions are."""
    if not isinstance(t, Tensor):
        return t
    if not validation.broadcasts(t.shape, target[-rank:]):
        names = ", ".join(("…", "Hq", "N", "M" if name == "attn_mask" else "1")[-rank:])
        message = f"{name} does not broadcast to ({names}) = {tuple(target[-rank:])}"
        validation.raise_error(_NAME, ValueError, message, **operands, **{name: t})
    t = t[(None,) * (len(target) - t.dim())]
    alike = all(size == 1 for size in t.shape[: len(lead)])
    return _one_batch(t, (1,) * len(lead) if alike else lead)


def _slopes(slopes: Any, lead: Sequence[int], heads: int, operands: dict[str, Tensor]) -> Any:  # (B or 1, Hq, 2)
    if not isinstance(slopes, Tensor):
        return slopes
    shape, ones = tuple(slopes.shape), (1,) * len(lead)
    if shape not in {(heads,), (*lead, heads), (*lead, heads, 2), (*ones, heads, 2)}:
        message = "alibi_slopes must be (Hq,), (…, Hq) or (…, Hq, 2), with the leading dimensions of the output"
        validation.raise_error(_NAME, ValueError, message, **operands, alibi_slopes=slopes)
    if shape == (heads,):
        return slopes
    return slopes.reshape(-1, heads) if shape == (*lead, heads) else slopes.reshape(-1, heads, 2)


def _lengths(lengths: Any, lead: Sequence[int], operands: dict[str, Tensor]) -> Any:  # (B,)
    if not isinstance(lengths, Tensor):
        return lengths
    if tuple(lengths.shape) != tuple(lead):
        message = f"key_lengths must have the output's dimensions before its heads, {tuple(lead)}"
        validation.raise_error(_NAME, ValueError, message, **operands, key_lengths=lengths)
    return lengths.reshape(-1)
