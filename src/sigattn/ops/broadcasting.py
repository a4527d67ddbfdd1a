"""Conversion of shapes that ``F.scaled_dot_product_attention`` accepts and the backends do not, to four dimensions.

PyTorch's function uses ``torch.matmul``, so query, key and value may have any number of leading dimensions, and these
broadcast. With ``enable_gqa`` the third dimension from the end, the heads, does not broadcast: there key and value
heads are repeated to the number of query heads.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from sigattn.ops import validation

_NAME = "sigmoid_attention"
_Refuse = Callable[..., NoReturn]  # raises ValueError with a message and the operands


def flatten(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, bias: Any, alibi_slopes: Any, key_lengths: Any,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor, Any, Any, Any, Any, tuple[int, ...] | None]:  # fmt: skip
    """Expand the leading dimensions to those of the output and flatten them into one batch dimension.

    Returns the first seven arguments, and the shape to which the output (B, Hq, N, Dv) is reshaped, None if they had
    one batch dimension before. Nothing is copied unless only some of several leading dimensions broadcast, or key and
    value have different numbers of heads, more than one each.
    """
    operands = {"query": query, "key": key, "value": value}
    validation.tensors(_NAME, **operands)

    def refuse(message: str, **others: Any) -> NoReturn:
        validation.raise_error(_NAME, ValueError, message, **operands, **others)

    ranks = [t.dim() for t in (query, key, value)]
    if min(ranks) < 2:
        refuse("query, key and value must have at least 2 dimensions, (length, head_dim)")
    if query.shape[-1] != key.shape[-1]:
        refuse("query and key must have the same head_dim (the last dimension)")
    if key.shape[-2] != value.shape[-2]:
        refuse("key and value must have the same length (the last dimension but one)")
    if enable_gqa and min(ranks) < 3:
        refuse("enable_gqa needs a dimension of heads, the third from the end")
    query, key, value = (t if t.dim() > 2 else t.unsqueeze(0) for t in (query, key, value))
    heads = _number_of_heads(query, key, value, enable_gqa, refuse)
    has_heads = key.shape[-3] == value.shape[-3] and (enable_gqa or query.shape[-3] == key.shape[-3])
    if ranks == [4, 4, 4] and has_heads and query.shape[0] == key.shape[0] == value.shape[0]:
        return query, key, value, attn_mask, bias, alibi_slopes, key_lengths, None
    try:
        lead = tuple(torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value))))
    except RuntimeError:
        refuse("query, key and value must have the same batch size, or 1 (the dimensions before the last three)")
    query = query if query.shape[-3] == heads else query.expand(*query.shape[:-3], heads, *query.shape[-2:])
    if key.shape[-3] != value.shape[-3] or not heads:
        key, value = (_repeat(t, heads) for t in (key, value))
    full, rank = (*lead, heads, query.shape[-2]), max(ranks)
    return (
        _one_batch(query, lead),
        _one_batch(key, lead),
        _one_batch(value, lead),
        _expanded("attn_mask", attn_mask, (*full, key.shape[-2]), lead, rank, refuse),
        _expanded("bias", bias, (*full, 1), lead, rank, refuse),
        _slopes(alibi_slopes, lead, heads, refuse),
        _lengths(key_lengths, lead, refuse),
        (*(full if rank > 2 else full[:-2] + full[-1:]), value.shape[-1]),
    )


def _number_of_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, refuse: _Refuse) -> int:
    heads, of_key, of_value = (t.shape[-3] for t in (query, key, value))
    if enable_gqa:
        for name, count in (("key", of_key), ("value", of_value)):
            message = None if heads == count else validation.misfit_of_heads(heads, count, "query", name, enable_gqa)
            if message is not None:
                refuse(message)
        return heads
    several = [count for count in (heads, of_key, of_value) if count != 1]
    if any(count != several[0] for count in several):
        if of_key != of_value and 1 not in (of_key, of_value):
            refuse("key and value must have the same number of heads, or 1 (third dimension from the end)")
        count = of_value if of_key == 1 else of_key
        message = validation.misfit_of_heads(heads, count, "query", "key", enable_gqa)
        refuse(f"{message}{validation.layout_hint(query, key)}")
    return several[0] if several else 1


def _repeat(t: Tensor, heads: int) -> Tensor:
    """Repeat each head of t (…, H, L, E) to the given number of heads, a view where H is 1."""
    if t.shape[-3] == heads:
        return t
    return t.unsqueeze(-3).expand(*t.shape[:-2], heads // t.shape[-3], *t.shape[-2:]).flatten(-4, -3)


def _one_batch(t: Tensor, lead: Sequence[int]) -> Tensor:  # (…, a, b, c) → (B, a, b, c)
    t = t.expand(*lead, *t.shape[-3:])
    return t.flatten(0, len(lead) - 1) if lead else t.unsqueeze(0)


def _expanded(name: str, t: Any, target: Sequence[int], lead: Sequence[int], rank: int, refuse: _Refuse) -> Any:
    """Return a mask or bias with one batch dimension, of size 1 if all leading dimensions are."""
    if not isinstance(t, Tensor):
        return t
    if not validation.broadcasts(t.shape, target[-rank:]):
        names = ", ".join(("…", "Hq", "N", "M" if name == "attn_mask" else "1")[-rank:])
        refuse(f"{name} does not broadcast to ({names}) = {tuple(target[-rank:])}", **{name: t})
    t = t[(None,) * (len(target) - t.dim())]
    alike = all(size == 1 for size in t.shape[: len(lead)])
    return _one_batch(t, (1,) * len(lead) if alike else lead)


def _slopes(slopes: Any, lead: Sequence[int], heads: int, refuse: _Refuse) -> Any:  # (Hq,) or (B or 1, Hq, 2)
    if not isinstance(slopes, Tensor):
        return slopes
    shape, ones = tuple(slopes.shape), (1,) * len(lead)
    # no set, because a size is a tensor while torch.jit.trace records, and a symbol while torch.export does
    if shape not in ((heads,), (*lead, heads), (*lead, heads, 2), (*ones, heads, 2)):
        message = "alibi_slopes must be (Hq,), (…, Hq) or (…, Hq, 2), with the leading dimensions of the output"
        refuse(message, alibi_slopes=slopes)
    if shape == (heads,):
        return slopes
    return slopes.reshape(-1, heads) if shape == (*lead, heads) else slopes.reshape(-1, heads, 2)


def _lengths(lengths: Any, lead: Sequence[int], refuse: _Refuse) -> Any:  # (B,)
    if not isinstance(lengths, Tensor):
        return lengths
    if tuple(lengths.shape) != tuple(lead):
        message = f"key_lengths must have the output's dimensions before its heads, {tuple(lead)}"
        refuse(message, key_lengths=lengths)
    return lengths.reshape(-1)
