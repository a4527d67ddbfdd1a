"""Conversion of nested tensors of the jagged layout, (B, H, ragged length, D), to packed sequences.

PyTorch's function expects (B, ragged length, H, D) with dimensions 1 and 2 transposed. Their values in memory are
(total length, H, D), the layout of the packed operator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigattn.ops import validation

_NAME = "sigmoid_attention"


class Packed(NamedTuple):
    """Sequences of nested query, key and value, concatenated."""

    query: Tensor  # (total_q, Hq, D)
    key: Tensor  # (total_k, Hkv, D)
    value: Tensor  # (total_k, Hkv, Dv)
    cu_seqlens_q: Tensor  # (B + 1,)
    cu_seqlens_k: Tensor  # (B + 1,)
    max_seqlen_q: int
    max_seqlen_k: int


def is_nested(*tensors: Any) -> bool:
    """Return True if one of the arguments is a nested tensor."""
    return any(isinstance(t, Tensor) and t.is_nested for t in tensors)


def has_ragged_batch(query: Any) -> bool:
    """Return True for (B, ragged, N, D), whose attention is dense for each entry of its values (total, N, D)."""
    return query.dim() > 3 and query._ragged_idx == 1


def check(query: Any, key: Any, value: Any) -> None:
    """Raise unless query, key and value are jagged, with the same batch, and key and value with the same lengths."""
    operands = {"query": query, "key": key, "value": value}
    t: Any
    for name, t in operands.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{_NAME}: {name} must be a tensor, got {type(t).__name__}")
        if not t.is_nested:
            raise TypeError(f"{_NAME}: query, key and value must all be nested, or none of them; {name} is not")
        if t.layout is not torch.jagged:
            raise TypeError(
                f"{_NAME}: {name} is a nested tensor of layout torch.strided, which is not supported: make it with "
                "torch.nested.nested_tensor(list, layout=torch.jagged)"
            )
        if t.lengths() is not None:  # type: ignore[attr-defined]
            raise ValueError(
                f"{_NAME}: the nested {name} has gaps between its sequences: call .contiguous() on it first"
            )
    if not (query._ragged_idx == key._ragged_idx == value._ragged_idx):
        validation.raise_error(
            _NAME, ValueError, "query, key and value must be ragged in the same dimension", **operands
        )
    if has_ragged_batch(query):
        if not (query.shape[1] == key.shape[1] == value.shape[1]):
            validation.raise_error(
                _NAME, ValueError, "query, key and value must be made with the same offsets tensor", **operands
            )
        return
    if query._ragged_idx != 2 or not (query.dim() == key.dim() == value.dim() == 4):
        message = (
            "nested query, key and value must be (B, H, ragged length, D): make (B, ragged length, H, D) and transpose"
        )
        validation.raise_error(_NAME, ValueError, f"{message} dimensions 1 and 2", **operands)
    if not (query.shape[0] == key.shape[0] == value.shape[0]):
        validation.raise_error(
            _NAME, ValueError, "query, key and value must have the same batch size (dimension 0)", **operands
        )
    if key.shape[2] != value.shape[2]:
        message = "key and value must have the same lengths: make them with the same offsets tensor"
        validation.raise_error(_NAME, ValueError, f"{message} (torch.nested.nested_tensor_from_jagged)", **operands)


def refuse(attn_mask: Any, key_lengths: Any, query_offset: int) -> None:
    """Raise ValueError for options that nested tensors do not support."""
    if attn_mask is not None:
        raise ValueError(
            f"{_NAME}: attn_mask is not supported with nested tensors; is_causal, window and alibi_slopes are"
        )
    if key_lengths is not None:
        raise ValueError(f"{_NAME}: key_lengths is not supported with nested tensors, whose offsets define the lengths")
    if query_offset:
        raise ValueError(f"{_NAME}: query_offset is not supported with nested tensors")


def has_equal_lengths(query: Any, key: Any) -> bool:
    """Return True if the sequences of query and key are known to be of the same lengths."""
    if query.shape[2] == key.shape[2]:  # the same offsets tensor
        return True
    if torch.compiler.is_compiling() or query.device.type != "cpu":
        return False
    return torch.equal(query.offsets(), key.offsets())


def pack(query: Any, key: Any, value: Any) -> Packed:
    """Return the values and offsets of checked nested tensors; nothing is copied if they were made by a transpose."""
    return Packed(
        query.transpose(1, 2).values(),
        key.transpose(1, 2).values(),
        value.transpose(1, 2).values(),
        query.offsets(),
        key.offsets(),
        _longest(query),
        _longest(key),
    )


def _longest(t: Any) -> int:
    """Return the length of the longest sequence, or in a compiled graph possibly an upper bound of it."""
    longest: int | None = t._maybe_max_seqlen
    if longest is not None:
        return longest
    if torch.compiler.is_compiling():  # a graph cannot read it from the offsets
        return int(t.transpose(1, 2).values().shape[0])
    return int(t._get_max_seqlen())


def like_transposed(query: Any, values: Tensor) -> Tensor:
    """Return values (total_q, …) as a nested tensor (B, ragged length, …) with the query's offsets."""
    out: Tensor = torch.nested.nested_tensor_from_jagged(
        values, query.offsets(), min_seqlen=query._maybe_min_seqlen, max_seqlen=query._maybe_max_seqlen
    )
    return out
