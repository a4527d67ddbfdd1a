"""Conversion of nested tensors of the jagged layout, (B, H, ragged length, D), to packed sequences.

PyTorch's function expects (B, ragged length, H, D) with dimensions 1 and 2 transposed. Their values in memory are
(total length, H, D), the layout of the packed operator.
"""

from typing import Any

import torch
from torch import Tensor

from sigattn.ops import validation

_NAME = "sigmoid_attention"


def check(query: Any, key: Any, value: Any, attn_mask: Any, key_lengths: Any, query_offset: int) -> None:
    """Raise unless query, key and value are jagged, with the same batch, and key and value with the same lengths."""
    options = {"attn_mask": attn_mask, "key_lengths": key_lengths, "query_offset": query_offset or None}
    for name, option in options.items():
        if option is not None:
            raise ValueError(
                f"{_NAME}: {name} is not supported with nested tensors, whose offsets define the lengths; is_causal, "
                "window and alibi_slopes are"
            )
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
                f"{_NAME}: the nested {name} has gaps between its sequences: call .contiguous() before .transpose(1, 2)"
            )
    message = None
    if any(t._ragged_idx != 2 or t.dim() != 4 for t in operands.values()):
        message = (
            "nested query, key and value must be (B, H, ragged length, D): make (B, ragged length, H, D) and transpose "
            "dimensions 1 and 2"
        )
    elif not query.shape[0] == key.shape[0] == value.shape[0]:
        message = "query, key and value must have the same batch size (dimension 0)"
    elif not has_equal_lengths(key, value):
        message = (
            "key and value must have the same lengths: make them with the same offsets tensor "
            "(torch.nested.nested_tensor_from_jagged)"
        )
    if message is not None:
        validation.raise_error(_NAME, ValueError, message, **operands)


def has_equal_lengths(a: Any, b: Any) -> bool:
    """Return True if the sequences of two nested tensors are of the same lengths."""
    if a.shape[2] == b.shape[2]:  # the same offsets tensor
        return True
    # reading offsets synchronises an accelerator; a compiled graph cannot read them
    return not torch.compiler.is_compiling() and torch.equal(a.offsets(), b.offsets())


def pack(query: Any, key: Any, value: Any) -> dict[str, Any]:
    """Return checked nested tensors as fields of a ``VarlenProblem``; nothing is copied if they were transposed."""
    return {
        "query": query.transpose(1, 2).values(),  # (total_q, Hq, D)
        "key": key.transpose(1, 2).values(),
        "value": value.transpose(1, 2).values(),
        "cu_seqlens_q": query.offsets(),
        "cu_seqlens_k": key.offsets(),
        "max_seqlen_q": _longest(query),
        "max_seqlen_k": _longest(key),
    }


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
    lengths = {"min_seqlen": query._maybe_min_seqlen, "max_seqlen": query._maybe_max_seqlen}
    return torch.nested.nested_tensor_from_jagged(values, query.offsets(), **lengths)
